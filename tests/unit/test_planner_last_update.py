"""The rows of what is updated last: how near to the simulator they bring the bound, and where they do not hold."""

from dataclasses import replace

import pytest

from autohete_fx.ir import BlockDecision, Optimizer, Overlap, Schedule
from autohete_fx.planner.bound.relaxation import relax
from autohete_fx.planner.model.simulate import simulate
from tests.planner_problems import MACHINE, cost, problem, program_of

EARLY = Schedule(overlap=Overlap.BACKWARD)


@pytest.mark.parametrize(
    "sizes, least",
    [
        ((10, 10, 10, 20), 1 - 1e-4),  # the head is updated last: backward is not slow enough for another
        ((10, 10, 10, 1), 0.9),  # it is updated before the gradients of others land
        ((1, 1, 1, 1), 0.9),  # none waits for another
    ],
)
def test_what_is_updated_last_still_has_to_go_up(sizes: tuple[int, ...], least: float):
    """With the states of all blocks on the host: the bound has the copy up of the last update, where that is known."""
    blocks = [cost(num_params=5 * size, param_bytes=20 * size, grad_bytes=5, forward_s=1.5) for size in sizes]
    free = problem(blocks, schedule=EARLY, allow_recompute=False)
    made = [BlockDecision(optimizer=Optimizer.HOST)] * len(blocks)
    relaxed, step_s = relax(program_of(free, made), deadline=float("inf")), simulate(free, made, events=False).step_s
    assert relaxed is not None and least * step_s <= relaxed.bound_s <= step_s


def test_an_update_that_a_gather_waits_for_overlaps_the_block_before():
    """The second block gathers while the first works, and so does not wait for that one's work after its update."""
    whole = cost(param_bytes=40, num_params=20)
    blocks = [whole, replace(whole, gathered_bytes=80, gathered_again_bytes=80, reduced_bytes=40)]
    machine = replace(MACHINE, net_bytes_per_s=3000.0, host_update_params_per_s=5.0)
    free = problem(blocks, machine=machine, num_ranks=2, schedule=EARLY, allow_recompute=False)
    made = [BlockDecision(optimizer=Optimizer.HOST), BlockDecision()]
    answer = program_of(free, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True)
    assert 0 < answer.bound <= simulate(free, made, events=False).step_s
