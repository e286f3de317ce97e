"""Train a GPT on whatever machines there are today, and go on when they change.

One script for one CPU, eight GPUs or a mix. Ranks that torchrun starts join the job, each builds its own layers alone, and the
job goes on with the newest save. Kill a process, or start one more torchrun: the others begin again with a new plan and lose at
most the steps since the last save.

    python examples/train_cluster.py
    torchrun --standalone --nproc-per-node 3 examples/train_cluster.py --disk /tmp/run --cloud /tmp/cloud
    torchrun --standalone --nproc-per-node 2 examples/train_cluster.py --shards
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:8 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29400 examples/train_cluster.py --disk /nvme/run --cloud s3://bucket/run
"""

import argparse
import importlib.util
import math
import time
from collections import Counter
from collections.abc import Sequence

import torch
from gpt import GPT, GPTConfig
from torch import Tensor
from train_gpt import load_text

from autohete_fx import cluster
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.job.joining import MakePlan
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage


def main() -> None:
    arguments = parse_arguments()
    config = GPTConfig(
        layers=arguments.layers, width=arguments.width, heads=4, context=arguments.context, dropout=arguments.dropout
    )
    text = load_text(None)

    def load(samples: range) -> tuple[Tensor, Tensor]:
        """Tokens and targets of these samples, each from its own place of the text."""
        length, rows = config.context, []
        for index in samples:
            start = int(torch.randint(len(text) - length, (), generator=torch.Generator().manual_seed(index)))
            rows.append(torch.from_numpy(text[start : start + length + 1].copy()).long())
        windows = torch.stack(rows)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def build_model() -> GPT:
        torch.set_default_dtype(torch.float64 if arguments.double else torch.float32)
        return GPT(config)

    plan, store = chosen_plan(arguments), None
    has_shards = isinstance(plan, ClusterPlan) and plan.has_shards
    if arguments.disk:
        store = cluster.Store(
            local=arguments.disk, cloud=arguments.cloud, every=arguments.every, cloud_every=arguments.cloud_every
        )
    job = cluster.join(
        build_model,
        lambda loss, batch: loss,  # this model returns its loss
        example=load(range(1)),
        global_batch=arguments.batch,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.0, weight_decay=0.1),
        learning_rate=lambda step: 3e-3 * min(1.0, (step + 1) / 10) * math.exp(-step / arguments.steps),
        max_grad_norm=1.0,
        plan=plan,
        store=store,
        backend=None if arguments.eager else "autohete" if arguments.shards or has_shards else "inductor",
        log=arguments.events,
        timeout_s=arguments.timeout,
    )
    while job.step < arguments.steps:
        done = job.train_step(load)
        time.sleep(arguments.pause)
        if torch.distributed.get_rank() == 0 and (done.step % 10 == 0 or job.step == arguments.steps):
            print(
                f"step {done.step}: loss {done.loss:.4f}, norm {done.grad_norm:.3f}, {done.seconds:.2f} s", flush=True
            )
    job.finish()
    if store and arguments.export and torch.distributed.get_rank() == 0:
        print(f"exported step {cluster.export(store, arguments.export)}")
    torch.distributed.destroy_process_group()


def chosen_plan(arguments: argparse.Namespace) -> ClusterPlan | MakePlan | None:
    """A file's; or shared evenly; or shards; or None: the job measures its layers and links, and plans."""
    if arguments.plan:
        return ClusterPlan.load(arguments.plan)
    if arguments.shards:
        return sharded_plan(arguments.batch)
    return even_plan(arguments.batch) if arguments.evenly else None


def even_plan(global_batch: int) -> MakePlan:
    """Plans for machines that are alike: pipelines of two or three stages, layers and samples shared evenly."""

    def make(members: Sequence[Member], layer_map: LayerMap) -> ClusterPlan:
        ranks, layers = len(members), layer_map.num_layers
        count = max(1, min(ranks // 2, global_batch // 3))
        depths = [ranks // count + (index < ranks % count) for index in range(count)]
        depths = [min(depth, layers, 3) for depth in depths]
        pipelines, free = [], list(members)
        for index, depth in enumerate(depths):
            ends = [layers * (place + 1) // depth - 1 for place in range(depth)]
            stages = []
            for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False):
                member = free.pop(0)
                stages.append(Stage(node=member.node, gpu=member.gpu, tp=1, first=first, last=last))
            samples = global_batch // count + (index < global_batch % count)
            pipelines.append(Pipeline(stages=tuple(stages), micro_batch=1, micro_batches=samples))
        return ClusterPlan(model="gpt", pipelines=tuple(pipelines), planner="even")

    return make


def sharded_plan(global_batch: int) -> MakePlan:
    """Plans that hold the model once on each machine, in shards over its GPUs. Machines are alike, and share samples evenly."""

    def make(members: Sequence[Member], layer_map: LayerMap) -> ClusterPlan:
        gpus = Counter(member.node for member in members)
        pipelines = []
        for member in {member.node: member for member in members}.values():
            count = gpus[member.node]
            last = layer_map.num_layers - 1
            stage = Stage(node=member.node, gpu=member.gpu, tp=1, first=0, last=last, shards=count)
            samples = global_batch // len(gpus) // count
            pipelines.append(Pipeline(stages=(stage,), micro_batch=count, micro_batches=samples))
        return ClusterPlan(model="gpt", pipelines=tuple(pipelines), planner="shards")

    return make


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=12, help="sequences of a step, over all ranks")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--plan", help="file of `autohete plan --cluster`; without it the job measures and plans")
    parser.add_argument("--evenly", action="store_true", help="share layers evenly instead")
    parser.add_argument(
        "--shards", action="store_true", help="hold the model in shards over each machine's GPUs instead"
    )
    parser.add_argument("--disk", help="folder for saves on each machine's disk")
    parser.add_argument("--cloud", help="URL or folder for saves that all machines reach")
    parser.add_argument("--every", type=int, default=10, help="steps between saves on disks")
    parser.add_argument("--cloud-every", type=int, default=20, help="steps between saves in the cloud")
    parser.add_argument("--export", help="a safetensors file for the trained model")
    parser.add_argument("--events", help="a file of JSON lines")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--double", action="store_true", help="train in fp64")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch or to disturb")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds until a silent rank is an error")
    arguments = parser.parse_args()
    if arguments.export and not arguments.disk:
        parser.error("--export writes what was saved, and nothing is; expected --disk beside it")
    if arguments.export and importlib.util.find_spec("safetensors") is None:
        parser.error("--export needs the package safetensors, which is not installed; pip install safetensors")
    return arguments


if __name__ == "__main__":
    main()
