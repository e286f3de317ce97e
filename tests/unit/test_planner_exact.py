"""Plans against exhaustive search, on random problems: within 1% of the best over all decisions and prefetch distances.

Up to three blocks the search is plain: every combination, replayed by the simulator. For more there are too many, but it
need only be shown that none is faster than the plan by more than 1%: combinations are built block by block, and those are
dropped that break the budget already, or whose time without any prefetch distance to keep is that long already.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from numpy.typing import NDArray

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Plan, Problem
from autohete_fx.planner.choices import MAX_PREFETCH_DISTANCE, choices, device_bytes, durations, fetches_ahead
from autohete_fx.planner.replays import Replays
from autohete_fx.planner.simulate import host_bytes, simulate
from autohete_fx.planner.solve import OPTIMAL_GAP, fits, solve
from tests.planner_problems import problems

QUIET = {
    "phases": [Phase.explicit, Phase.generate],
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
}


def at_all_distances(given_problem: Problem, block: int) -> list[BlockDecision]:
    farthest = max(1, min(MAX_PREFETCH_DISTANCE, len(given_problem.costs) - 1))
    return [
        replace(choice, prefetch_distance=distance)
        for choice in choices(given_problem, block)
        for distance in (range(1, farthest + 1) if fetches_ahead(choice) else (1,))
    ]


@settings(max_examples=60, **QUIET)
@given(problems(most_blocks=6, budgets=False))
def test_replays_of_arrays_are_those_of_the_simulator(free: Problem):
    replays = Replays(free)
    random = np.random.default_rng(0)
    rows = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(8)])
    for row, seconds, copied_s in zip(rows, replays.seconds(rows), replays.copied_seconds(rows), strict=True):
        decisions = replays.decisions(row)
        assert np.array_equal(replays.row(decisions), row)
        replayed = simulate(free, decisions, events=False)
        assert seconds == pytest.approx(replayed.step_s, rel=1e-9)
        assert copied_s == pytest.approx(sum(t.busy_s for t in replayed.busy_s if t.lane.value in ("h2d", "d2h")))
        assert replays.device_use(row).max() == replayed.peak_bytes
        assert replays.host_use(row) == replayed.host_bytes


@settings(max_examples=25, **QUIET)
@given(problems(most_blocks=3))
def test_up_to_three_blocks(limited: Problem):
    everything = itertools.product(*(at_all_distances(limited, block) for block in range(len(limited.costs))))
    replays = [simulate(limited, decisions, events=False) for decisions in everything]
    fitting = [replayed.step_s for replayed in replays if fits(limited, replayed)]
    if not fitting:
        with pytest.raises(InfeasiblePlanError):
            solve(limited)
        return
    plan = solve(limited)
    assert min(fitting) - 1e-9 <= plan.step_s <= 1.01 * min(fitting)
    assert plan.lower_bound_s <= min(fitting) * (1 + 1e-6)
    assert nothing_is_faster(limited, min(fitting) * (1 - 1e-9))
    assert not nothing_is_faster(limited, min(fitting) * (1 + 1e-9))


@settings(max_examples=20, **QUIET)
@given(problems(least_blocks=4, most_blocks=5))
def test_four_and_five_blocks(limited: Problem):
    check(limited)


@pytest.mark.slow
@settings(max_examples=60, **QUIET)
@given(problems(least_blocks=6, most_blocks=7))
def test_six_and_seven_blocks(limited: Problem):
    check(limited)


def check(limited: Problem) -> None:
    try:
        plan: Plan = solve(limited)
    except InfeasiblePlanError:
        assert nothing_is_faster(limited, float("inf"))
        return
    assert nothing_is_faster(limited, plan.step_s / 1.01)
    assert nothing_is_faster(limited, plan.lower_bound_s * (1 - 1e-6))
    assert (plan.status == "optimal") == (plan.gap <= OPTIMAL_GAP)


def nothing_is_faster(limited: Problem, threshold_s: float) -> bool:
    """Whether no assignment that keeps the budgets takes less than ``threshold_s``."""
    blocks = range(len(limited.costs))
    options = [choices(limited, block) for block in blocks]
    use = [np.array([device_bytes(limited, block, option) for option in options[block]]) for block in blocks]
    host = [np.array([host_bytes(limited, block, option) for option in options[block]]) for block in blocks]
    rows, device_used, host_used = (
        np.zeros((1, 0), dtype=np.int64),
        np.full((1, use[0].shape[1]), limited.fixed_bytes),
        np.zeros(1),
    )
    for block in blocks:
        taken = np.repeat(np.arange(len(rows)), len(options[block]))
        option = np.tile(np.arange(len(options[block])), len(rows))
        rows = np.column_stack([rows[taken], option])
        device_used, host_used = device_used[taken] + use[block][option], host_used[taken] + host[block][option]
        least_device = device_used + sum(table.min(axis=0) for table in use[block + 1 :])
        least_host = host_used + sum(table.min() for table in host[block + 1 :])
        kept = within(limited, least_device.max(axis=1), least_host)
        if np.isfinite(threshold_s):
            kept[kept] = least_seconds(limited, rows[kept]) < threshold_s
        rows, device_used, host_used = rows[kept], device_used[kept], host_used[kept]
    if not np.isfinite(threshold_s):
        return not len(rows)
    replays = Replays(limited)
    return not any(
        (
            replays.seconds(every_distance(limited, replays, [options[b][k] for b, k in enumerate(row)])) < threshold_s
        ).any()
        for row in rows
    )


def within(limited: Problem, peak: NDArray, host: NDArray) -> NDArray[np.bool_]:
    device_limit = np.inf if limited.device_budget_bytes is None else limited.device_budget_bytes
    host_limit = np.inf if limited.host_budget_bytes is None else limited.host_budget_bytes
    return (peak <= device_limit) & (host <= host_limit)


def every_distance(limited: Problem, replays: Replays, decisions: list[BlockDecision]) -> NDArray[np.int64]:
    """Rows of these decisions at every combination of prefetch distances that keeps the budget."""
    distances = [range(1, replays.farthest + 1) if fetches_ahead(decision) else (1,) for decision in decisions]
    start = [replays.index[block][decision] for block, decision in enumerate(decisions)]
    rows = np.array(
        [[k + d - 1 for k, d in zip(start, combination, strict=True)] for combination in itertools.product(*distances)]
    )
    device_used = limited.fixed_bytes + sum(replays.use[block, column] for block, column in enumerate(rows.T))
    return rows[within(limited, device_used.max(axis=1), replays.host_use(rows))]


def least_seconds(limited: Problem, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What assignments that begin with these decisions take at least: every copy up is issued when its pass begins, and
    blocks that are undecided take the least of each kind of work."""
    decided, micro_batches = rows.shape[1], limited.micro_batches if limited.training else 1

    def table(block: int, name: str) -> NDArray[np.float64]:
        seconds = np.array([getattr(durations(limited, block, option), name) for option in choices(limited, block)])
        return seconds[rows[:, block]] if block < decided else np.full(len(rows), seconds.min())

    total = np.zeros(len(rows))
    order = list(range(len(limited.costs)))
    for name, blocks in (("forward", order), ("backward", order[::-1])):
        clock, up, down, left = np.zeros((4, len(rows)))
        for block in blocks:
            up = up + table(block, f"{name}_up")
            clock = np.maximum(clock, up) + table(block, f"{name}_work")
            before, copied = left, table(block, f"{name}_down")
            down = np.where(copied > 0, np.maximum(down, clock) + copied, down)
            left = np.where(copied > 0, down, 0.0)
            clock = np.maximum(clock, before)
        total += micro_batches * np.maximum(clock, left)
    on_device, on_host = (sum(table(block, name) for block in order) for name in ("device_update", "host_update"))
    return total + (on_device + on_host if limited.machine.device_type == "cpu" else np.maximum(on_device, on_host))
