"""Lanes that slow each other down: what a replay makes of them, what it keeps to, and how they are timed."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Activations, BlockDecision, Lane, Machine, Params, Problem
from autohete_fx.ir.machine import CONTENDING
from autohete_fx.machine import contention as timing
from autohete_fx.machine.described import machine_text
from autohete_fx.planner.model import simulate as judge
from autohete_fx.planner.model.choices import choices
from autohete_fx.planner.model.contention import Factors, factors_of, settled
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.solve import solve
from tests.planner_problems import MACHINE, QUIET, cost, problem, problems, sharded
from tests.unit.test_planner_collectives import AGAIN, RING, shared, times

PAIRS = [(lane.value, beside.value) for lane, beside in itertools.permutations(CONTENDING, 2)]


def slowed(machine: Machine, **pairs: float) -> Machine:
    """With pairs such as ``h2d_compute``, the first of which keeps so much beside the second."""
    return replace(machine, contention=tuple((*name.split("_"), kept) for name, kept in pairs.items()))


@st.composite
def contended(draw: st.DrawFn, budgets: bool = False) -> Problem:
    kept = st.floats(0.3, 1.0)
    pairs = draw(st.lists(st.sampled_from(PAIRS), unique=True, min_size=1, max_size=6))
    of = problems(most_blocks=4, budgets=False) | problems(most_blocks=4, budgets=False, early=True)
    free = draw(sharded(of, budgets=budgets))
    return replace(free, machine=replace(free.machine, contention=tuple((*pair, draw(kept)) for pair in pairs)))


def any_decisions(of: Problem) -> list[BlockDecision]:
    random = np.random.default_rng(0)
    options = [choices(of, block) for block in range(len(of.costs))]
    return [of_block[random.integers(len(of_block))] for of_block in options]


def test_a_piece_takes_its_seconds_divided_by_its_rate():
    host = [BlockDecision(params=Params.HOST)] * 2
    free = problem([cost(forward_s=1.0, param_bytes=60)] * 2, training=False)
    alone = simulate(free, host)
    assert times(alone, "fetch") == {0: (0.0, 0.6), 1: (0.6, 1.2)} and times(alone, "forward")[0] == (0.6, 1.6)
    # The second fetch runs beside the first forward, at half of its rate.
    beside = simulate(replace(free, machine=slowed(MACHINE, h2d_compute=0.5)), host)
    assert times(beside, "fetch")[1] == pytest.approx((0.6, 1.6 + 0.1), abs=1e-3)
    # The forward keeps three quarters of its rate while the fetch lasts.
    both = simulate(replace(free, machine=slowed(MACHINE, compute_h2d=0.75)), host)
    assert times(both, "forward")[0] == pytest.approx((0.6, 1.2 + (1 - 0.75 * 0.6)), abs=1e-3)
    assert alone.step_s < beside.step_s and alone.step_s < both.step_s


def test_rates_beside_several_lanes_are_multiplied():
    """Net works beside computation all the time, and for a while beside a copy home as well."""
    machine = slowed(replace(RING, d2h_bytes_per_s=25.0), net_compute=0.5, net_d2h=0.4)
    offloads = BlockDecision(activations=Activations.OFFLOAD, num_offloaded=2)
    replayed = simulate(shared(3, machine=machine), [offloads] * 3)
    events = {lane: [(e.start_s, e.end_s) for e in replayed.events if e.lane is lane] for lane in Lane}
    gather = next(e for e in replayed.events if e.label == "gather" and e.block == 2)
    instants = np.linspace(gather.start_s, gather.end_s, 20_001)[:-1]

    def works(lane: Lane) -> Any:
        return np.any([(begin <= instants) & (instants < end) for begin, end in events[lane]], axis=0)

    rate = np.where(works(Lane.COMPUTE), 0.5, 1.0) * np.where(works(Lane.D2H), 0.4, 1.0)
    assert rate.min() == pytest.approx(0.2)
    assert rate.mean() * (gather.end_s - gather.start_s) == pytest.approx(0.5, rel=1e-2)


@settings(max_examples=40, **QUIET)
@given(contended())
def test_factors_settle_and_nothing_becomes_faster(free: Problem):
    decisions, alone = any_decisions(free), replace(free, machine=replace(free.machine, contention=()))

    def replay(factors: Factors) -> Any:
        run = judge._Replay(free, decisions, False, factors)
        run.run()
        return run.lanes.times

    factors = settled(free.machine, replay)
    again = factors_of(free.machine, replay(factors), factors)
    assert all(again.get(piece, 1.0) == pytest.approx(factor, rel=1e-2) for piece, factor in factors.items())
    slower, quiet = simulate(free, decisions), simulate(alone, decisions)
    assert slower.step_s >= quiet.step_s * (1 - 1e-9) and slower.peak_bytes == quiet.peak_bytes
    for one, other in zip(slower.busy_s, quiet.busy_s, strict=True):
        assert one.busy_s >= other.busy_s * (1 - 1e-9), one.lane


@settings(max_examples=8, **QUIET)
@given(contended(budgets=True))
def test_plans_count_contention_and_no_bound_is_above_a_plan(limited: Problem):
    quiet = replace(limited, machine=replace(limited.machine, contention=()))
    try:
        plan, blind = (solve(each, time_limit_s=1.0, explains=False) for each in (limited, quiet))
    except InfeasiblePlanError:
        return
    replayed = simulate(limited, plan.decisions)
    assert plan.step_s == replayed.step_s and plan.lower_bound_s <= plan.step_s
    assert plan.lower_bound_s <= simulate(limited, blind.decisions).step_s * (1 + 1e-9)


def test_a_gather_is_saved_where_it_slows_computation_down():
    hidden = shared(4, machine=replace(RING, net_bytes_per_s=60.0), device_budget_bytes=10_000)
    slow = replace(hidden, machine=slowed(hidden.machine, compute_net=0.5))
    plan = solve(slow)
    assert all(decision.keeps_fetched for decision in plan.decisions)
    assert plan.step_s < simulate(slow, [AGAIN] * 4).step_s - 0.5
    assert plan.reasons is not None and plan.reasons == reasons_of(slow, plan.decisions)
    others = [each.next_best for each in plan.reasons.blocks]
    assert all(other is None or other.step_s >= plan.step_s * (1 - 1e-6) for other in others)


class Accelerator:
    """Streams whose pending seconds go by while somebody waits, at the rates of a machine."""

    def __init__(self, kept: dict[tuple[str, str], float]) -> None:
        self.kept, self.now_s = kept, 0.0
        self.pending_s: dict[str, float] = {"compute": 0.0, "h2d": 0.0}
        self.names = iter(self.pending_s)
        self.current = ""

    def stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, next(self.names))

    def work(self, seconds: float) -> None:
        self.pending_s[self.current] += seconds

    def wait(self, name: str) -> None:
        while self.pending_s[name] > 1e-12:
            busy = [each for each, left in self.pending_s.items() if left > 1e-12]
            rate = {a: self.kept.get((a, next((b for b in busy if b != a), a)), 1.0) for a in busy}
            took_s = min(self.pending_s[each] / rate[each] for each in busy)
            for each in busy:
                self.pending_s[each] -= took_s * rate[each]
            self.now_s += took_s


class FakeStream:
    def __init__(self, device: Accelerator, name: str) -> None:
        self.device, self.name = device, name

    def __enter__(self) -> None:
        self.device.current = self.name

    def __exit__(self, *error: object) -> None:
        self.device.current = ""

    def synchronize(self) -> None:
        self.device.wait(self.name)


def test_lanes_are_timed_beside_each_other(monkeypatch: pytest.MonkeyPatch):
    device = Accelerator({("compute", "h2d"): 0.8, ("h2d", "compute"): 0.55})

    def drain(_: object) -> None:
        for name in device.pending_s:
            device.wait(name)

    monkeypatch.setattr(timing.torch, "Stream", device.stream)
    monkeypatch.setattr(timing.torch, "accelerator", SimpleNamespace(synchronize=drain))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: device.now_s))
    work = {Lane.COMPUTE: lambda: device.work(0.003), Lane.H2D: lambda: device.work(0.011)}
    found = timing.measure_contention(torch.device("cuda"), work)
    assert found == (("compute", "h2d", 0.8), ("h2d", "compute", 0.55))
    assert "h2d beside compute" in machine_text(replace(MACHINE, contention=found))


def test_lanes_that_leave_each_other_alone_are_not_listed():
    seconds = {(Lane.H2D, None): 1.0, (Lane.D2H, None): 1.0, (Lane.H2D, Lane.D2H): 1.02, (Lane.D2H, Lane.H2D): 1.6}
    found = timing.contention_of([Lane.H2D, Lane.D2H], lambda lane, beside: seconds[lane, beside])
    assert found == (("d2h", "h2d", 0.62),)
