"""Train the GPT of ``train_gpt.py`` on several processes that share it, each in half the device memory that plain needs.

Every process keeps its rows of the parameters, gradients and optimizer states, and trains on text of its own.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt_sharded.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt_sharded.py --budget 200MiB --steps 50
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from gpt import GPT
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from train_gpt import (
    Run,
    Setup,
    Text,
    batch_of,
    choose_setup,
    describe,
    learning_rate_factor,
    load_text,
    new_model,
    parse_arguments,
    plain_run,
    sample,
)

import autohete_fx
from autohete_fx.options import resolve_bytes
from autohete_fx.report import ComparisonRow, TrainingProgress, comparison_table, format_bytes


def main() -> None:
    arguments = parse_arguments()
    setup = choose_setup(arguments)
    text = load_text(arguments.text)
    dist.init_process_group("nccl" if setup.device == "cuda" else "gloo")
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    if setup.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    plain: list[Run | None] = [None]
    if is_first:
        describe(setup, text)
        plain = [plain_run(setup, arguments)]
    dist.broadcast_object_list(plain, src=0)
    (alone,) = plain
    assert alone is not None
    budget_bytes = resolve_bytes(arguments.budget, alone.peak_bytes)
    if is_first:
        print(f"{ranks} processes, memory budget of each: {format_bytes(budget_bytes)}", flush=True)
        print(f"plain's peak: {format_bytes(alone.peak_bytes)}\n", flush=True)
    model, run = train_shards(setup, text, budget_bytes)
    peaks: list[int] = [0] * ranks
    dist.all_gather_object(peaks, run.peak_bytes)
    with autohete_fx.gathered(model), torch.compiler.set_stance("force_eager"):
        written = sample(model, arguments.sample_bytes)
    if is_first:
        print(f"\n{written}\n\n{comparison(setup, alone, run, max(peaks), ranks)}")
        print(f"budget {format_bytes(budget_bytes)}, measured peaks {', '.join(map(format_bytes, peaks))}")
        print(f"loss {run.losses[0]:.3f} -> {statistics.fmean(run.losses[-5:]):.3f}")
    dist.destroy_process_group()


def train_shards(setup: Setup, text: Text, budget_bytes: int) -> tuple[GPT, Run]:
    """The loop of ``train_gpt.py`` on one rank. Three things differ: the model is sharded, the optimizer clips, the text is this
    rank's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(setup.device, (ranks,))
    model = autohete_fx.shard(new_model(setup), mesh)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=0.1, max_grad_norm=1.0)
    model.compile(backend="autohete", options={"memory_budget": budget_bytes})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(setup))
    step_s, losses = [], []
    torch.manual_seed(rank)
    shown = TrainingProgress(setup.steps, budget_bytes=budget_bytes) if rank == 0 else nullcontext()
    with shown as progress, autohete_fx.MemoryMeter(setup.device) as meter:
        for step in range(setup.steps):
            start_s = time.perf_counter()
            loss = model(*batch_of(setup, text, step * ranks + rank))
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(mean_of_ranks(loss))
            step_s.append(time.perf_counter() - start_s)
            if progress is not None and step == 0:
                progress.print(f"{autohete_fx.compilations()[-1].plan_table()}\n")
            if progress is not None:
                tokens = ranks * setup.tokens_per_step
                progress.update(step + 1, loss=losses[-1], tokens=tokens, peak_bytes=meter.peak_bytes)
    return model, Run(step_s=tuple(step_s), losses=tuple(losses), peak_bytes=meter.peak_bytes)


def mean_of_ranks(loss: Tensor) -> float:
    """The loss over the batches of all ranks."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def comparison(setup: Setup, plain: Run, run: Run, peak_bytes: int, ranks: int) -> str:
    """Plain on one process beside all ranks, and what was predicted for them."""
    compilation = next(c for c in autohete_fx.compilations() if c.training)
    tokens = setup.tokens_per_step
    rows = [
        ComparisonRow(name="plain, 1 process", step_s=plain.typical_step_s, peak_bytes=plain.peak_bytes),
        ComparisonRow(
            name="predicted", step_s=compilation.predicted_step_s, peak_bytes=compilation.predicted_peak_bytes
        ),
        ComparisonRow(name=f"measured, {ranks} processes", step_s=run.typical_step_s, peak_bytes=peak_bytes),
    ]
    counts = [tokens, ranks * tokens, ranks * tokens]
    rows = [
        ComparisonRow(name=row.name, step_s=row.step_s, peak_bytes=row.peak_bytes, tokens_per_s=count / row.step_s)
        for row, count in zip(rows, counts, strict=True)
        if row.step_s
    ]
    return comparison_table(rows, baseline="plain, 1 process")


if __name__ == "__main__":
    main()
