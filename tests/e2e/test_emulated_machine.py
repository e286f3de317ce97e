"""Training on an emulated machine (`examples/benchmarks/emulated.py`): every lane works in the simulator's order, and what is
trained is what eager training gives."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor

import autohete_fx
from autohete_fx import Activations, BlockDecision, Compilation, Optimizer, Params, Plan
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.ticket import LaneRecord, Ticket
from autohete_fx.runtime.updates import Updates
from examples.benchmarks.emulated import Emulation, Speeds
from tests import training
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


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


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


def simulated(compilation: autohete_fx.Compilation, label: str, lane: Lane | None = None) -> list[int]:
    """Blocks in the order in which the simulator begins with something of theirs, in one step."""
    return [e.block for e in compilation.events if e.label == label and lane in (None, e.lane)]


@pytest.mark.parametrize("schedule", [BY_PRIORITY, AS_THEY_COME], ids=["priority", "fifo"])
@pytest.mark.parametrize("name", PLANS)
def test_compute_and_updates_run_in_the_simulators_order(name: str, schedule: Schedule, watch: Watch):
    _, emulation, compilation = emulated(PLANS[name], schedule)
    assert watch.updates_on(Lane.UPDATE) == STEPS * simulated(compilation, "update", Lane.UPDATE)
    step = [(phase, block) for phase in ("forward", "backward") for block in simulated(compilation, phase)]
    assert [(phase, block) for phase, block, _, _ in emulation.computed] == STEPS * step


def test_gradients_leave_and_parameters_return_in_the_simulators_order(watch: Watch):
    _, _, compilation = emulated(STATES, BY_PRIORITY)
    assert watch.updates_on(Lane.H2D) == STEPS * simulated(compilation, "upload")
    gradients = in_runs(t.priority - len(LABELS) for t in watch.served if t.label == "offload")
    assert gradients == STEPS * simulated(compilation, "gradients")


def test_parameters_come_down_before_their_first_update_only(watch: Watch):
    """From then on the host has what it sent; the simulator knows of no such copy."""
    emulated(STATES, BY_PRIORITY)
    updated = [t.num_bytes for t in watch.served if t.lane is Lane.UPDATE]
    assert [t.num_bytes for t in watch.served if t.label == "download"] == updated[: len(updated) // STEPS]


@pytest.mark.parametrize("name", ["states", "some", "all"])
def test_host_memory_is_what_the_plan_counts(name: str, watch: Watch):
    _, _, compilation = emulated(PLANS[name], BY_PRIORITY)
    predicted = compilation.plan.host_bytes
    assert 0.95 * predicted <= watch.most_host_bytes <= 1.01 * predicted  # homes begin at whole cache lines


@pytest.mark.parametrize("schedule", [Schedule(), BY_PRIORITY, AS_THEY_COME], ids=["none", "priority", "fifo"])
def test_an_emulated_machine_trains_as_eager_does(schedule: Schedule):
    trained, _, _ = emulated((*PLANS["mixed"][:-2], *SOME[-2:]), schedule, clip=True)
    assert_equal(trained, plain(make("cpu", SIZES), "eager", sizes=SIZES, clip=True), bitwise=True)
