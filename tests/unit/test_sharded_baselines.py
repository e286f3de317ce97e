"""Plans beside what other systems whose ranks share a model do: gather everything again, or keep everything that was gathered."""

from dataclasses import replace

import pytest

from autohete_fx.ir import BlockDecision, Overlap, Problem, Schedule
from autohete_fx.planner.baselines import SHARDED_BASELINES, fits
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.solve import OPTIMAL_GAP, solve
from tests.planner_problems import MACHINE, cost, problem


def layers(ranks: int, share: float, *, net: float, copies: float, updates: float) -> Problem:
    """Layers of different sizes and a budget as a share of what gathering again takes."""
    blocks = []
    for size in (40 + i * 37 % 90 for i in range(12)):
        whole = ranks * size
        blocks.append(
            cost(
                param_bytes=size,
                grad_bytes=size,
                optimizer_bytes=3 * size,
                saved_bytes=200 - size,
                num_params=size // 4,
                gathered_bytes=whole,
                gathered_again_bytes=whole,
                reduced_bytes=whole,
            )
        )
    machine = replace(
        MACHINE,
        net_bytes_per_s=net,
        net_latency_s=0.01,
        h2d_bytes_per_s=copies,
        d2h_bytes_per_s=copies,
        host_update_params_per_s=updates,
    )
    free = problem(blocks, machine=machine, num_ranks=ranks, schedule=Schedule(overlap=Overlap.STEP))
    peak = simulate(free, [BlockDecision()] * 12, events=False).peak_bytes
    return replace(free, device_budget_bytes=int(share * peak))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "rates",
    [
        {"net": 150.0, "copies": 100.0, "updates": 10.0},
        {"net": 2000.0, "copies": 30.0, "updates": 10.0},
        {"net": 2000.0, "copies": 100.0, "updates": 2.0},
    ],
    ids=["net binds", "copies bind", "updates bind"],
)
@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_a_plan_is_never_slower_than_gathering_always_or_keeping_always(
    ranks: int, rates: dict[str, float], share: float
):
    limited = layers(ranks, share, **rates)
    plan = solve(limited, time_limit_s=1.0, explains=False)
    assert fits(limited, plan) and plan.lower_bound_s <= plan.step_s
    for name, baseline in SHARDED_BASELINES.items():
        simple = baseline(limited)
        assert simple.status == name
        on_schedule = simulate(limited, simple.decisions, events=False)
        if fits(limited, simple):
            assert plan.step_s <= min(simple.step_s, on_schedule.step_s) * (1 + OPTIMAL_GAP)


@pytest.mark.slow
def test_memory_decides_how_many_blocks_are_kept():
    """Net binds: what is kept saves a gather, until all are."""
    limited = (layers(2, share, net=60.0, copies=100.0, updates=10.0) for share in (0.5, 2.0))
    plans = (solve(each, time_limit_s=1.0, explains=False) for each in limited)
    kept = [sum(decision.keeps_fetched for decision in plan.decisions) for plan in plans]
    assert kept[0] < kept[1] == 12
