"""Training on an emulated machine (`examples/benchmarks/emulated.py`): every lane works in the simulator's order, and what is
trained is what eager training gives."""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

import autohete_fx
from autohete_fx import Activations, BlockDecision, Compilation, Optimizer, Params, Plan
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.runtime.lanes.ticket import LaneRecord, Ticket
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import placement_of
from examples.benchmarks.emulated import Emulation, Speeds
from tests import training
from tests.main_job import slow
from tests.thorough import thorough
from tests.training import LABELS, STEPS, Sizes, assert_equal, make, ours, plain

SIZES = Sizes(width=128, batch=4, time=32)
SPEEDS = Speeds(forward_s=0.004, h2d_bytes_per_s=2e8, d2h_bytes_per_s=2e8, update_params_per_s=4e7)
STATES = (BlockDecision(optimizer=Optimizer.HOST),) * len(LABELS)
ALL = (BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST),) * len(LABELS)
AGAIN = (BlockDecision(optimizer=Optimizer.HOST, activations=Activations.RECOMPUTE),) * len(LABELS)
SOME = (BlockDecision(optimizer=Optimizer.HOST, num_moved_states=2),) * len(LABELS)
PLANS = {
    "states": STATES,
    "some": SOME,
    "all": ALL,
    "recompute": AGAIN,
    "mixed": (STATES[0], ALL[1], AGAIN[2], ALL[3], STATES[4]),
}
BY_PRIORITY = Schedule(overlap=Overlap.STEP)
AS_THEY_COME = Schedule(overlap=Overlap.STEP, priority=False)
IN_BACKWARD = Schedule(overlap=Overlap.BACKWARD)


class Watch:
    """What the lanes of emulated machines began with, in order, and the block of each update and upload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served: list[Ticket] = []
        self.blocks: dict[Ticket, int] = {}
        self.most_host_bytes = 0
        seconds_of, add = Emulation.seconds_of, Updates.add

        def noting_seconds(emulation: Emulation, work: Ticket | LaneRecord) -> float:
            assert isinstance(work, Ticket)
            self.served.append(work)
            return seconds_of(emulation, work)

        def noting_add(
            updates: Updates, ticket: Ticket, param: Tensor, others: Iterable[Tensor] = (), *, made_by: Ticket
        ) -> None:
            placement = placement_of(param)
            assert placement is not None
            self.blocks[ticket] = self.blocks[made_by] = placement.block
            self.most_host_bytes = max(self.most_host_bytes, placement.tier.in_use_bytes)
            add(updates, ticket, param, others, made_by=made_by)

        monkeypatch.setattr(Emulation, "seconds_of", noting_seconds)
        monkeypatch.setattr(Updates, "add", noting_add)

    def updates_on(self, lane: Lane) -> list[int]:
        """Blocks whose updates, or updated parameters, the lane served."""
        return in_runs(self.blocks[t] for t in self.served if t.lane is lane and t in self.blocks)


def in_runs(blocks: Iterable[int]) -> list[int]:
    """Each block once for all its tensors."""
    return [block for block, _ in itertools.groupby(blocks)]


def emulated(
    decisions: tuple[BlockDecision, ...], schedule: Schedule, **how: Any
) -> tuple[list[Tensor], Emulation, Compilation]:
    plan = Plan(labels=LABELS, decisions=decisions, schedule=schedule)
    with Emulation(SPEEDS).running() as emulation:
        options = {**emulation.options, "plan": plan}
        trained = ours(make("cpu", SIZES), "eager", options, sizes=SIZES, **how)
    return trained, emulation, training.training_compilation()


@dataclass(frozen=True)
class Watched:
    """What an emulated machine did in a training."""

    compilation: Compilation
    computed: list[tuple[str, int]]
    updates: list[int]
    uploads: list[int]
    gradients: list[int]
    updated_bytes: list[int]
    downloaded_bytes: list[int]
    most_host_bytes: int


@functools.cache
def watched(name: str, schedule: Schedule) -> Watched:
    """Trained once for all that is asked of it."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        _, emulation, compilation = emulated(PLANS[name], schedule)
    return Watched(
        compilation=compilation,
        computed=[(phase, block) for phase, block, _, _ in emulation.computed],
        updates=watch.updates_on(Lane.UPDATE),
        uploads=watch.updates_on(Lane.H2D),
        gradients=in_runs(t.priority - len(LABELS) for t in watch.served if t.label == "offload"),
        updated_bytes=[t.num_bytes for t in watch.served if t.lane is Lane.UPDATE],
        downloaded_bytes=[t.num_bytes for t in watch.served if t.label == "download"],
        most_host_bytes=watch.most_host_bytes,
    )


def simulated(compilation: autohete_fx.Compilation, label: str, lane: Lane | None = None) -> list[int]:
    """Blocks in the order in which the simulator begins with something of theirs, in one step."""
    return [e.block for e in compilation.events if e.label == label and lane in (None, e.lane)]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param("mixed", BY_PRIORITY, id="mixed-priority"),
        *(pytest.param(n, BY_PRIORITY, id=f"{n}-priority", marks=pytest.mark.slow) for n in PLANS if n != "mixed"),
        pytest.param("mixed", AS_THEY_COME, id="mixed-fifo", marks=pytest.mark.slow),
        *(thorough(n, AS_THEY_COME, id=f"{n}-fifo") for n in PLANS if n != "mixed"),
    ],
)
def test_compute_and_updates_run_in_the_simulators_order(name: str, schedule: Schedule):
    found = watched(name, schedule)
    assert found.updates == STEPS * simulated(found.compilation, "update", Lane.UPDATE)
    step = [(phase, block) for phase in ("forward", "backward") for block in simulated(found.compilation, phase)]
    assert found.computed == STEPS * step


@pytest.mark.slow
def test_gradients_leave_and_parameters_return_in_the_simulators_order():
    found = watched("states", BY_PRIORITY)
    assert found.uploads == STEPS * simulated(found.compilation, "upload")
    assert found.gradients == STEPS * simulated(found.compilation, "gradients")


@pytest.mark.parametrize(
    ("overlap", "priority"),
    [("backward", True), slow("step", False), thorough("step", True), thorough("backward", False)],
)
def test_what_is_sent_up_goes_behind_backwards_copies_and_in_the_order_of_blocks(
    overlap: str, priority: bool, monkeypatch: pytest.MonkeyPatch
):
    watch = Watch(monkeypatch)
    emulated(PLANS["mixed"], Schedule(overlap=Overlap(overlap), priority=priority), overlap=overlap)
    up = [t for t in watch.served if t.lane is Lane.H2D]
    sent = [t for t in up if t.label == "upload"]
    assert sent and all(t.priority == watch.blocks[t] for t in sent)
    fetched = in_runs(t.priority for t in up if t.label == "prefetch")
    assert fetched == STEPS * [1, 3, 1 - len(LABELS), 3 - len(LABELS)]


@pytest.mark.slow
def test_parameters_come_down_before_their_first_update_only():
    """From then on the host has what it sent; the simulator knows of no such copy."""
    found = watched("states", BY_PRIORITY)
    assert found.downloaded_bytes == found.updated_bytes[: len(found.updated_bytes) // STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["states", "some", "all"])
def test_host_memory_is_what_the_plan_counts(name: str):
    found = watched(name, BY_PRIORITY)
    predicted = found.compilation.plan.host_bytes
    assert 0.95 * predicted <= found.most_host_bytes <= 1.01 * predicted  # homes begin at whole cache lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [Schedule(), thorough(BY_PRIORITY), AS_THEY_COME, IN_BACKWARD],
    ids=["none", "priority", "fifo", "backward"],
)
def test_an_emulated_machine_trains_as_eager_does(schedule: Schedule):
    how: dict[str, Any] = {"overlap": "backward"} if schedule is IN_BACKWARD else {"clip": True}
    trained, _, _ = emulated((*PLANS["mixed"][:-2], *SOME[-2:]), schedule, **how)
    how.pop("overlap", None)
    assert_equal(trained, plain(make("cpu", SIZES), "eager", sizes=SIZES, **how), bitwise=True)
