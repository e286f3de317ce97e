"""Run on the GPU that computes nothing: trains a small GPT, prints as JSON what the compiler wrote and the allocator counted."""

import dataclasses
import json
import os
import re
from pathlib import Path
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering

import autohete_fx
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.machine.budgets import tuning_bytes
from autohete_fx.optim import kernels
from autohete_fx.optim.adamw import ADAMW
from autohete_fx.options import Options
from autohete_fx.profiler.memory.scratch import gpu_attention_scratch_bytes
from tests.training import Sizes, batch, make, plan, training_compilation

SIZES = Sizes(width=256, batch=4, time=128)
ATTENTION = (
    ("flash", torch.bfloat16, True, 4, 16, 1024, 128),
    ("flash", torch.bfloat16, True, 8, 16, 1000, 96),
    ("flash", torch.bfloat16, False, 4, 16, 1024, 128),
    ("efficient", torch.bfloat16, True, 4, 16, 1024, 64),
    ("efficient", torch.bfloat16, False, 4, 16, 1024, 64),
    ("efficient", torch.float32, True, 8, 16, 1000, 96),
)


def scratch(name: str, dtype: torch.dtype, rows_first: bool, *size: int) -> tuple[int, int]:
    """Bytes that attention's backward takes beside its results: counted, and as the profiler tells them."""
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention{end}") for end in ("", "_backward")
    )
    batch, heads, rows, width = size
    shape = (batch, rows, heads, width) if rows_first else size
    q, k, v, grad = (torch.empty(shape, dtype=dtype, device="cuda") for _ in range(4))
    if rows_first:
        q, k, v, grad = (t.transpose(1, 2) for t in (q, k, v, grad))
    if name == "flash":
        made = forward(q, k, v, 0.0, True)
        arguments = (grad, q, k, v, *made[:6], 0.0, True, *made[6:8])
    else:
        made = forward(q, k, v, None, True)
        arguments = (grad, q, k, v, None, *made, 0.0, [True, True, True, False])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = backward(*arguments)
    taken = sum(result.nbytes for result in results if result is not None and result.numel())
    counted = torch.cuda.max_memory_allocated() - before - taken
    return counted, gpu_attention_scratch_bytes(f"aten._scaled_dot_product_{name}_attention_backward", arguments[:5])


def accesses(length: int) -> list[str]:
    """Instructions by which a GPU's kernel updates a parameter in bf16 of this length: those that read or write memory."""
    folder, cuda = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), torch.device("cuda", 0)
    before = set(folder.rglob("*.ptx"))
    grads = [torch.empty(length, dtype=torch.bfloat16, device=cuda) for _ in range(2)]
    states = [torch.empty(length, device=cuda) for _ in range(3)]
    coefs = torch.tensor(ADAMW.coefficients(dict(ADAMW.hyperparameters), 2.0), device=cuda)
    with (
        mock.patch.object(kernels, "_verify"),
        config.patch(force_disable_caches=True),
    ):  # which nothing would pass here
        kernels.update(ADAMW, *grads, states, coefs)
    texts = [file.read_text() for file in set(folder.rglob("*.ptx")) - before]
    return sorted({word for text in texts for word in re.findall(r"(?:ld|st)\.global[\w.:]*", text)})


def compiled(sizes: Sizes, overlap: Overlap) -> tuple[torch.nn.Module, autohete_fx.AdamW, list[str]]:
    """A model and its optimizer, under a plan with everything in it, and where the compiler's wrappers will be."""
    torch._dynamo.reset()
    wrappers: list[str] = []
    GraphLowering.save_output_code = staticmethod(wrappers.append)
    model = make("cuda", sizes)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3, overlap=overlap.value)
    chosen = dataclasses.replace(plan("mixed"), schedule=Schedule(overlap=overlap))
    model.compile(backend="autohete", options={"profile": "analytic", "plan": chosen})
    return model, optimizer, wrappers


def main() -> None:
    # A process measures the machine once, in more memory than this model has.
    autohete_fx.preview(make("cuda"), batch("cuda", 0), options={"profile": "analytic"})
    model, optimizer, wrappers = compiled(SIZES, Overlap.BACKWARD)
    peaks = []
    with config.patch(force_disable_caches=True):
        for step in range(3):
            tokens = batch("cuda", step, sizes=SIZES)
            torch.cuda.reset_peak_memory_stats()
            model(tokens).backward()
            peaks.append(torch.cuda.max_memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
    compilation = training_compilation()
    with config.patch(force_disable_caches=True):  # of another size, which Inductor orders otherwise
        small, _, others = compiled(Sizes(), Overlap.STEP)
        small(batch("cuda", 0)).backward()
    found = {
        "wrappers": [*wrappers[:2], *others[:2]],
        "graphs": [
            c.readable(stage) for c in (compilation, training_compilation()) for stage in ("forward", "backward")
        ],
        "peaks": peaks,
        "accesses": [accesses(length) for length in (4096, 4095)],
        "scratch": [scratch(*how) for how in ATTENTION],
        "predicted": compilation.plan.peak_bytes,
        "tuning": tuning_bytes(torch.device("cuda", 0), Options()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
