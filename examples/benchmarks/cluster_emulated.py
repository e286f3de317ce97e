"""An emulated cluster of unlike GPUs: steps of jobs as measured, against the simulator, for plans of several planners.

Six processes on this machine are GPUs of three types, each on a node of its own. Their layers take the time of their type,
forward and backward, and hardly compute. As on a GPU, a layer only queues its work: it begins when the work before it is done, and
the process sleeps until all of it is done where a pass ends. Python between two layers then costs nothing, as long as it is faster
than the GPU. Seconds by which a process woke too late are counted, and stand beside the errors as ``late_s``.

Links are those of this machine, measured by the processes. Gradients are so large that sums over two replicas of the model take
about `SUMS_S` on these links. A sum is queued behind the work before it, as on a GPU, and begins when all owners have come to it.
It ends that much later. Those of a process take its port one after another, in the order in which the job begins them. Every
layer fills a bucket, as large layers do. For each plan a job trains a few steps; its median step is compared with the simulated
one. Plans: ours, the equal grid, the proportional grid, the two stages of AutoHet's paper, the best of one type, and three drawn at
random.

    python examples/benchmarks/cluster_emulated.py --json cluster_emulated.json
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from results import environment, save
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from autohete_fx import cluster
from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.job import sums
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.measuring.links import measured_cluster
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.planner.baselines import BASELINES
from autohete_fx.cluster.planner.solve import plan_cluster
from autohete_fx.cluster.simulation.gradient_sums import sums_of
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.cluster.spec import Cluster

GPUS = ("fast", "fast", "middle", "middle", "slow", "slow")
FORWARD_S = {"fast": 0.008, "middle": 0.014, "slow": 0.026}
"""Of a layer and a sample; backward takes twice as long."""
LAYERS, GLOBAL_BATCH, WIDTH = 8, 24, 64
PARAMS_BYTES = 4 * WIDTH * WIDTH
"""Of a layer."""
SUMS_S = 0.25
"""About what sums of the gradients of all layers take, where two have them."""
_MANY = 1000.0
WARM_UP, STEPS = 1, 4


class Clock:
    """The work queue of this process's emulated GPU.

    Attributes:
        done_s: when all of it is done, as `time.perf_counter` counts.
        late_s: seconds by which the process woke after its work was done.
    """

    def __init__(self) -> None:
        self.done_s, self.late_s = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Queue work."""
        self.done_s = max(self.done_s, time.perf_counter()) + seconds

    def wait(self) -> None:
        """Sleep until all of it is done."""
        left_s = self.done_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self.late_s += time.perf_counter() - self.done_s


CLOCK = Clock()


class Port:
    """What this process sums gradients over, one sum at a time.

    Attributes:
        s_per_byte: of what it sends.
    """

    def __init__(self) -> None:
        self.s_per_byte, self.free_s = 0.0, 0.0


PORT = Port()


class Sum:
    """A sum of gradients that is under way.

    Args:
        work: the sum over this machine's own links.
        begins: the same of when it begins: when all owners have done the work before it.
        begin_s: what that gives.
        sent_bytes: by this process.
    """

    def __init__(self, work: dist.Work, begins: dist.Work, begin_s: Tensor, sent_bytes: float) -> None:
        self._works, self._begin_s, self._seconds = (work, begins), begin_s, sent_bytes * PORT.s_per_byte

    def wait(self) -> None:
        """Until it ends."""
        for work in self._works:
            work.wait()
        PORT.free_s = max(PORT.free_s, float(self._begin_s)) + self._seconds
        time.sleep(max(0.0, PORT.free_s - time.perf_counter()))


@contextmanager
def emulated_sums() -> Iterator[None]:
    """Sums of gradients, which alone are asynchronous, take their time."""
    all_reduce = dist.all_reduce

    def summed(tensor: Tensor, *args: Any, group: Any = None, async_op: bool = False, **rest: Any) -> Any:
        work = all_reduce(tensor, *args, group=group, async_op=async_op, **rest)
        if not async_op or work is None:
            return work
        ranks = dist.get_world_size(group)
        begin_s = torch.tensor(max(CLOCK.done_s, time.perf_counter()), dtype=torch.float64)
        begins = all_reduce(begin_s, dist.ReduceOp.MAX, group=group, async_op=True)
        assert begins is not None
        return Sum(work, begins, begin_s, 2 * (ranks - 1) / ranks * tensor.nbytes)

    with (
        mock.patch.object(dist, "all_reduce", summed),
        mock.patch.object(sums, "BUCKET_BYTES", PARAMS_BYTES),
    ):
        yield


class Work(torch.autograd.Function):
    """The identity, which takes given times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        CLOCK.add(len(x) * seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        CLOCK.add(2 * len(grads[0]) * ctx.seconds)
        torch.autograd.Variable._execution_engine.queue_callback(CLOCK.wait)  # when the pass is over
        return grads[0], None


class Layer(nn.Module):
    """A layer of an emulated GPU."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH, bias=False), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Work.apply(self.linear(x), self.seconds)  # its gradient comes when its work is done


class Model(nn.Module):
    """Layers between two linear ones that take no time."""

    def __init__(self, gpu: str) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(Layer(FORWARD_S[gpu]) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def emulated_costs(found: Cluster) -> CostTable:
    """The costs that the layers have on these links."""
    kinds = ("first", *("layer" for _ in range(LAYERS)), "last")
    times = [
        LayerTime(kind=kind, gpu=gpu, tp=1, micro_batch=size, forward_s=forward_s, backward_s=2 * forward_s)
        for gpu, layer_s in FORWARD_S.items()
        for size in (1, 2)
        for kind, forward_s in (("first", 0.0), ("layer", size * layer_s), ("last", 0.0))
    ]
    sizes = [
        LayerBytes(
            kind=kind,
            tp=1,
            params_bytes=PARAMS_BYTES,
            kept_bytes=4 * WIDTH,
            output_bytes=0 if kind == "last" else 4 * WIDTH,
        )
        for kind in ("first", "layer", "last")
    ]
    updates = [UpdateTime(gpu=gpu, fixed_s=0.0, s_per_byte=0.0) for gpu in FORWARD_S]
    made = CostTable(
        model="emulated", kinds=kinds, times=tuple(times), sizes=tuple(sizes), updates=tuple(updates), source="emulated"
    )
    alone = [
        Pipeline(
            stages=(Stage(node=node.name, gpu=node.gpu, tp=1, first=0, last=LAYERS + 1),),
            micro_batch=1,
            micro_batches=1,
        )
        for node in found.nodes[:2]
    ]
    made = replace(made, gradient_bytes_per_byte=_MANY)
    both = sums_of(ClusterPlan(model="emulated", pipelines=tuple(alone)), made, Links(found))
    longest_s = max(seconds for each in both for seconds in each.port_s.values())
    return replace(made, gradient_bytes_per_byte=_MANY * SUMS_S / longest_s)


def port_s_per_byte(plan: ClusterPlan, found: Cluster, costs: CostTable, node: str) -> float:
    """Seconds of a byte of gradients that a process sends, on the links that the simulator has; 0 where it sends none."""
    seconds = num_bytes = 0.0
    for each in sums_of(plan, costs, Links(found)):
        owners = [plan.pipelines[index].stages[place] for index, place in each.owners]
        if node in {stage.node for stage in owners}:
            layers = set.intersection(*(set(stage.layers) for stage in owners))
            num_bytes += 2 * (len(owners) - 1) / len(owners) * PARAMS_BYTES * len(layers)
            seconds += each.port_s[node, True]
    return seconds / num_bytes if num_bytes else 0.0


def plans(found: Cluster, costs: CostTable) -> dict[str, ClusterPlan]:
    """By the planner's name."""
    made = {"ours": plan_cluster(found, costs, global_batch=GLOBAL_BATCH).plan}
    for name, make in BASELINES.items():
        plan = make(found, costs, GLOBAL_BATCH)
        if plan is not None:
            made[name] = plan
    chance = random.Random(5)
    for index in range(3):
        made[f"random {index + 1}"] = drawn(found, chance)
    return made


def drawn(found: Cluster, chance: random.Random) -> ClusterPlan:
    """Two pipelines of GPUs in any order, with any layers."""
    nodes = list(found.nodes)
    chance.shuffle(nodes)
    first = chance.randint(1, 4)
    pipelines = []
    for mine, samples in ((nodes[:first], GLOBAL_BATCH // 2), (nodes[first : first + 2], GLOBAL_BATCH // 2)):
        ends = [*sorted(chance.sample(range(LAYERS + 1), len(mine) - 1)), LAYERS + 1]
        stages = tuple(
            Stage(node=node.name, gpu=node.gpu, tp=1, first=begin, last=end)
            for node, begin, end in zip(mine, [0, *(end + 1 for end in ends)], ends, strict=False)
        )
        pipelines.append(Pipeline(stages=stages, micro_batch=1, micro_batches=samples))
    return ClusterPlan(model="emulated", pipelines=tuple(pipelines), planner="random")


def rank_main(rank: int, meeting: str, json_path: str | None) -> None:
    """One emulated GPU."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(GPUS), timeout=timedelta(seconds=300)
    )
    member = cluster.Member(node=f"node-{rank}", gpu=GPUS[rank])
    members: list[Any] = [None] * len(GPUS)
    dist.all_gather_object(members, member)
    found = measured_cluster(members, torch.device("cpu"), fresh=True)
    costs = emulated_costs(found)
    chosen: list[Any] = [plans(found, costs) if rank == 0 else None]
    dist.broadcast_object_list(chosen)
    rows = []
    for name, plan in chosen[0].items():
        predicted_s = simulate(plan, found, costs).iteration_s
        PORT.s_per_byte = port_s_per_byte(plan, found, costs, member.node)
        with emulated_sums():
            measured_s, late_s = trained(plan, member)
        rows.append(
            {
                "planner": name,
                "stages": [
                    [[stage.gpu, stage.first, stage.last] for stage in pipeline.stages] for pipeline in plan.pipelines
                ],
                "micro_batches": [[pipeline.micro_batch, pipeline.micro_batches] for pipeline in plan.pipelines],
                "predicted_s": predicted_s,
                "measured_s": measured_s,
                "late_s": late_s,
                "error": predicted_s / measured_s - 1,
            }
        )
        if rank == 0:
            print(
                f"{name:<20} measured {measured_s:.3f} s, simulated {predicted_s:.3f} s, {rows[-1]['error']:+.1%}, of which"
                f" {late_s / measured_s:.1%} woke late",
                flush=True,
            )
    if rank == 0:
        ours = rows[0]["measured_s"]
        for row in rows:
            row["measured_over_ours"] = row["measured_s"] / ours
        errors = [abs(row["error"]) for row in rows]
        print(f"largest error {max(errors):.1%}, median {statistics.median(errors):.1%}")
        print(
            ", ".join(f"{row['planner']} {row['measured_over_ours']:.2f}" for row in rows[1:])
            + " times ours, as measured"
        )
        save(Path(json_path) if json_path else None, rows)
    dist.destroy_process_group()


def trained(plan: ClusterPlan, member: cluster.Member) -> tuple[float, float]:
    """The median step of a job of that plan, of the slowest rank; and seconds of a step that the rank which woke latest did."""
    job = cluster.join(
        lambda: Model(member.gpu),
        lambda out, batch: out.square().mean(),
        example=torch.zeros(1, WIDTH),
        global_batch=GLOBAL_BATCH,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        plan=plan,
        backend=None,
        member=member,
    )
    if job.stage is not None:
        job.stage.register_forward_hook(lambda *_: CLOCK.wait())
    seconds = []
    for step in range(WARM_UP + STEPS):
        dist.barrier()
        if step == WARM_UP:
            CLOCK.late_s = 0.0
        seconds.append(job.train_step(lambda samples: torch.ones(len(samples), WIDTH)).seconds)
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    late = torch.tensor(CLOCK.late_s / STEPS, dtype=torch.float64)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return float(slowest.median()), float(late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file of the results")
    arguments = parser.parse_args()
    print(environment())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    meeting = f"/tmp/emulated-{os.getpid()}"
    spawn(rank_main, (meeting, arguments.json), nprocs=len(GPUS))
    Path(meeting).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
