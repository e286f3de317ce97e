"""The planner's entry: in comes a problem, out comes the plan that the runtime will execute, or an error that says why not.

    everything fits on the device      that is the plan; no solver is called
    else    baselines that fit, improved        -> incumbent
            free program                        -> lower bound for every plan, and its decisions improved
            one-ahead program, hinted           -> best decisions at prefetch distance 1, improved
            nothing fits                        -> InfeasiblePlanError

Every candidate is judged by the replay in `simulate`, which is independent of the programs; the plan returned has been
replayed and fits.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Plan, Problem
from autohete_fx.planner.baselines import evaluate
from autohete_fx.planner.formulation import RELATIVE_GAP, Program, choices
from autohete_fx.planner.improve import Improver
from autohete_fx.planner.infeasible import infeasible, smallest_peak
from autohete_fx.planner.simulate import simulate

REPLAYED_BLOCKS_PER_SECOND = 10_000
"""How much local search a second of the limit buys, in replayed blocks; counted, so that every run does the same."""

OPTIMAL_GAP = 2 * RELATIVE_GAP
"""A plan within this of its bound is called optimal: the solver's own tolerance, and rounding."""


def solve(problem: Problem, *, time_limit_s: float = 10.0) -> Plan:
    """The fastest plan found within the budgets.

    The search is bounded by counted work worth about ``time_limit_s`` seconds on a usual core, so that equal problems
    get equal decisions; a machine several times slower is stopped by the clock. ``status`` is ``optimal`` where
    ``gap`` is within the solver's tolerance, else ``feasible``. Everything on the device is preferred wherever it fits.

    Raises InfeasiblePlanError where no plan fits the budgets.
    """
    began = time.monotonic()
    usual = _usual(problem)
    replay = simulate(problem, usual, events=False)
    everything_stays = all(d.params is Params.DEVICE and d.optimizer is Optimizer.DEVICE for d in usual)
    if _fits(problem, usual) and (everything_stays or not problem.costs):
        return _plan(problem, usual, _compute_bound_s(problem), began)
    if not problem.costs:
        raise infeasible(problem, limit_s=time_limit_s)
    del replay
    decisions, bound_s = _search(problem, time_limit_s)
    assert _fits(problem, decisions), "the replay breaks a budget that the integer program keeps"
    return _plan(problem, decisions, max(bound_s, _compute_bound_s(problem)), began)
