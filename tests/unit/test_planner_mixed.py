"""Updates of 16-bit parameters at the rate of their kernel: on the host, or on a device that is the host."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.ir import BlockDecision, Optimizer, Params, Problem
from autohete_fx.machine.devices import machine_of_rank
from autohete_fx.planner.bound.work_bound import work_bound_s
from autohete_fx.planner.model.figures import device_update_s, host_computed_s
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.solve import solve
from autohete_fx.profiler.analytic import _mixed_share
from autohete_fx.profiler.partition import ParamInfo
from tests.planner_problems import MACHINE, QUIET, cost, problem, problems, program_of

ON_HOST = BlockDecision(optimizer=Optimizer.HOST, params=Params.HOST)
SLOWER = dataclasses.replace(MACHINE, mixed_update_speed=0.5)


def host_s(free: Problem) -> float:
    return host_computed_s(free, 0, ON_HOST)


def test_the_kernel_of_the_parameters_decides():
    """Five parameters take half a second; of 16 bits a whole one, of which a half a block may have three quarters."""
    found = [host_s(problem([cost(mixed_share=share)], machine=SLOWER)) for share in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([0.5, 0.75, 1.0])


def test_the_device_has_its_own_unless_it_is_the_host():
    for device_type, expected_s in (("cuda", 0.05), ("cpu", 0.1)):
        here = problem([cost(mixed_share=1.0)], machine=dataclasses.replace(SLOWER, device_type=device_type))
        assert device_update_s(here, 0, BlockDecision(), Optimizer.DEVICE) == pytest.approx(expected_s)
        assert host_s(here) == pytest.approx(1.0)


def test_ranks_that_share_a_host_share_that():
    rank = machine_of_rank(SLOWER, ranks_of_node=4, net_bytes_per_s=1.0, net_latency_s=0.0)
    rates = [m.updates_per_s(on_host=True, mixed_share=1.0) for m in (SLOWER, rank)]
    assert rates == pytest.approx([5.0, 5.0 / 4])


@settings(max_examples=20, **QUIET)
@given(problems(most_blocks=4), st.floats(0.3, 3.0))
def test_nothing_changes_where_the_figure_or_such_parameters_are_absent(free: Problem, speed: float):
    mixed = dataclasses.replace(free, costs=tuple(dataclasses.replace(c, mixed_share=1.0) for c in free.costs))
    known = dataclasses.replace(free, machine=dataclasses.replace(free.machine, mixed_update_speed=speed))
    made = [BlockDecision(optimizer=Optimizer.HOST)] * len(free.costs)
    assert simulate(free, made) == simulate(mixed, made) == simulate(known, made)
    assert work_bound_s(free) == work_bound_s(mixed) == work_bound_s(known)


@settings(max_examples=40, **QUIET)
@given(
    problems(most_blocks=4, budgets=False) | problems(most_blocks=4, budgets=False, early=True),
    st.floats(0.3, 3.0),
    st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_search_and_bounds_count_it_as_the_simulator(free: Problem, speed: float, shares: list[float], seed: int):
    costs = tuple(dataclasses.replace(c, mixed_share=share) for c, share in zip(free.costs, shares, strict=False))
    machine = dataclasses.replace(free.machine, mixed_update_speed=speed)
    here = dataclasses.replace(free, costs=costs, machine=machine)
    replays, random = Replays(here), np.random.default_rng(seed)
    rows = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(4)])
    for row, seconds in zip(rows, replays.seconds(rows), strict=True):
        made = list(replays.decisions(row))
        step_s = simulate(here, made, events=False).step_s
        assert seconds == pytest.approx(step_s, rel=1e-9)
        assert work_bound_s(here) <= step_s * (1 + 1e-9)
    answer = program_of(here, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True)
    assert answer.decisions is not None and 0 < answer.bound <= step_s * (1 + 1e-9)


def test_fewer_are_left_to_a_host_that_is_slow_at_them():
    counts = []
    for machine, share in itertools.product(
        (MACHINE, dataclasses.replace(MACHINE, mixed_update_speed=0.1)), (0.0, 1.0)
    ):
        free = problem([cost(mixed_share=share)] * 4, machine=machine, allow_streamed_optimizer=True)
        peak = simulate(free, [BlockDecision()] * 4).peak_bytes
        plan = solve(dataclasses.replace(free, device_budget_bytes=int(0.6 * peak)), time_limit_s=2.0)
        counts.append(sum(decision.updates_on_host for decision in plan.decisions))
    assert counts[0] == counts[1] == counts[2] > counts[3]


def test_the_share_of_a_block_is_of_all_that_its_updates_move():
    """One parameter of 16 bits in two states and one of as many elements whose update moves half."""
    of_16_bits = ParamInfo(fqn="a", num_bytes=20, num_elements=10, requires_grad=True, state_bytes=120, is_mixed=True)
    other = dataclasses.replace(of_16_bits, fqn="b", update_share=0.5, is_mixed=False)
    assert [_mixed_share(each) for each in ([], [other], [of_16_bits], [of_16_bits, other])] == [0.0, 0.0, 1.0, 1 / 1.5]
