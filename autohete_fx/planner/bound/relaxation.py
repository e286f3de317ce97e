"""Bounds on the objective of an integer program: in comes a `Program`, out comes what no solution is below.

`relax` leaves out that choices are whole numbers. Seconds do for a hundred blocks, identical or not, where branching needs
minutes. OR-Tools' GLOP solves it. `dive` goes on from there to whole numbers, at which a search begins.

`branch` adds cutting planes and some branching, which few blocks need. The fewer there are, the more a mixture of two choices gains
that none of them has. A *lump*, a block with a parameter that is larger than a usual block, gains as much. Others can share out
among them what a mixture does, a lump with nobody. With whole numbers for lumps only, the program is solved in about the time that
its relaxation takes. OR-Tools' SCIP does both. On these programs it proves in seconds what takes CP-SAT minutes.

Both count in floating point, bytes and times in shares of what all blocks hold and compute (GLOP does not end on badly scaled
rows). Their tolerance lowers the result.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder

from autohete_fx.ir import BlockDecision, Optimizer, Problem
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.variables import TICKS

_TOLERANCE = 1e-5
_PARAMETERS = "use_dual_simplex: true perturb_costs_in_dual_simplex: true"
"""With many identical blocks the primal simplex may walk in circles for minutes."""
_SECOND_PARAMETERS = "use_dual_simplex: true use_preprocessing: false"
"""For small programs that GLOP's preprocessing makes ill-conditioned: it says that it has no answer."""
_PROVING = "\n".join(
    (
        *(f"heuristics/{name}/freq = -1" for name in ("alns", "crossover", "gins", "rens", "rins")),
        "presolving/maxrestarts = 0",
        "nodeselection/bfs/stdpriority = 1000000",
        "nodeselection/bfs/maxplungedepth = 0",
        "branching/fullstrong/priority = 1000000",
    )
)
"""Every branch is where the bound is, on the choice that moves it most: where blocks are alike, most choices hardly move it, since
another block makes up for them. Of what looks for solutions only what finds the first is left: SCIP tells no bound without one."""
_LEAST_SHARE = 1e-6
_MADE_AT_ONCE = 0.3
"""The share of mixed choices that a dive makes before it looks again. A third of that takes twice as long and finds hardly more."""
_LARGE_BYTES = 2**20
_MOST_LUMPS = 4
_END_BLOCKS = 3
_INFINITE = 2**62
_LEAST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """A solved relaxation.

    Attributes:
        bound_s: seconds that no solution of the program is below.
        shares: by block, what share each of `Program.treated` and then each of `Program.placed` has.
        wasted_s: likewise, its reduced cost: by how many seconds all solutions with this option are above the bound, at least.
    """

    bound_s: float
    shares: tuple[NDArray[np.float64], ...]
    wasted_s: tuple[NDArray[np.float64], ...]


def relax(program: Program, *, deadline: float, mixtures: bool = True) -> Relaxed | None:
    """The relaxation of a program with objective `Program.minimize_step`; None where time ran out, or GLOP has no
    answer.

    ``mixtures``: whether choices that other choices can be mixed to have columns of their own. Without them it is as tight, and
    found in half the time where blocks have many choices.
    """
    model, variables = _model(program, whole=(), without=() if mixtures else _mixtures(program))
    solver = _solved(model, deadline)
    if solver is None:
        return None
    seconds = TICKS * program.tick_s
    chosen = [[variables[x.index] for x in of_block] for of_block in program.chosen]
    shares = (np.array([solver.value(x) for x in of_block]) for of_block in chosen)
    wasted_s = (np.array([max(0.0, solver.reduced_cost(x) * seconds) for x in of_block]) for of_block in chosen)
    bound_s = solver.objective_value * seconds * (1 - _TOLERANCE)
    return Relaxed(bound_s=bound_s, shares=tuple(shares), wasted_s=tuple(wasted_s))


def dive(program: Program, *, deadline: float) -> list[tuple[NDArray[np.float64], ...]]:
    """Shares of the relaxation as those of `Relaxed`, then of others in which more and more choices are made.

    Choices that are whole are made. Likewise each time a part of the others, the least mixed. All that is left to choose makes up
    for that. The last shares are whole, unless time ran out, or what was made left no solution.
    """
    model, variables = _model(program, whole=(), without=_mixtures(program))
    choices = [variables[x.index] for of_block in program.chosen for x in of_block]
    sizes = [len(kind) for both in zip(program.treated, program.placed, strict=True) for kind in both]
    kinds = np.split(np.arange(len(choices)), np.cumsum(sizes)[:-1])
    found: list[tuple[NDArray[np.float64], ...]] = []
    while (solver := _solved(model, deadline)) is not None:
        shares = np.array([solver.value(x) for x in choices])
        found.append(tuple(np.split(shares, np.cumsum([len(of_block) for of_block in program.chosen])[:-1])))
        kinds.sort(key=lambda options: -shares[options].max())
        mixed = sum(shares[options].max() < 1 - _LEAST_SHARE for options in kinds)
        if not mixed:
            break
        made = len(kinds) - mixed + math.ceil(_MADE_AT_ONCE * mixed)
        for options in kinds[:made]:
            for other in np.delete(options, shares[options].argmax()):
                choices[other].upper_bound = 0.0
        kinds = kinds[made:]
    return found


def _solved(model: model_builder.Model, deadline: float) -> model_builder.Solver | None:
    """A solver that knows the solution; None where time ran out, or GLOP has no answer."""
    solver = model_builder.Solver("GLOP")
    for parameters in (_PARAMETERS, _SECOND_PARAMETERS):
        solver.set_solver_specific_parameters(parameters)
        solver.set_time_limit_in_seconds(max(_LEAST_S, deadline - time.monotonic()))
        status = solver.solve(model)
        if status != model_builder.SolveStatus.ABNORMAL:
            break
    return solver if status == model_builder.SolveStatus.OPTIMAL else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """A program after some branches.

    Attributes:
        bound_s: seconds that no solution is below; 0 where none is known.
        shares: as those of `Relaxed`, of the best that was found; None where nothing was.
    """

    bound_s: float
    shares: tuple[NDArray[np.float64], ...] | None


def lumps_of(problem: Problem) -> list[int]:
    """The blocks with a trained parameter that is larger than all those of a block on average; a few at most, largest first."""
    usual = sum(cost.num_params for cost in problem.costs) / len(problem.costs)
    largest = {block: max(cost.trained, default=0) for block, cost in enumerate(problem.costs)}
    return sorted((block for block in largest if largest[block] > usual), key=lambda block: -largest[block])[
        :_MOST_LUMPS
    ]


def ends_of(problem: Problem) -> list[int]:
    """The first blocks and the last, and the lumps.

    All others wait for an early block, and nothing but the next step for a late one. Blocks between them share out a mixture.
    Whole numbers at the ends therefore prove nearly what they prove everywhere, in a fraction of the time.
    """
    count = len(problem.costs)
    ends = [block for block in range(count) if min(block, count - 1 - block) < _END_BLOCKS]
    return sorted({*ends, *lumps_of(problem)})


def branch(program: Program, *, branches: int, deadline: float, blocks: Sequence[int] | None = None) -> Branched:
    """Bound and best shares of a program with objective `Program.minimize_step` after so many branches, or at ``deadline``.

    Only choices of ``blocks`` are whole numbers, where they are given. Cutting planes do most of it before the first branch. Other
    threads run meanwhile.
    """
    model, variables = _model(program, whole=range(program.num_blocks) if blocks is None else blocks)
    solver = model_builder.Solver("SCIP")
    solver.set_solver_specific_parameters(f"limits/totalnodes = {branches}\n{_PROVING}")
    solver.set_time_limit_in_seconds(max(_LEAST_S, deadline - time.monotonic()))
    if solver.solve(model) not in (model_builder.SolveStatus.OPTIMAL, model_builder.SolveStatus.FEASIBLE):
        return Branched(bound_s=0.0, shares=None)
    return Branched(
        bound_s=solver.best_objective_bound * TICKS * program.tick_s * (1 - _TOLERANCE),
        shares=tuple(np.array([solver.value(variables[x.index]) for x in of_block]) for of_block in program.chosen),
    )


def _mixtures(program: Program) -> set[int]:
    """The variables of places that are mixtures of others, and no better than these.

    Where all parameters of a block have states and updates alike, moving the states of some takes a share of what moving all does.
    The share is theirs in its parameters. Bytes are rounded down, which in a large block is far less than the tolerance. Rows of
    the last update do not mix.
    """
    found: set[int] = set()
    if program.knows_last_update:
        return found
    for cost, treated, placed, chosen in zip(
        program.problem.costs, program.treated, program.placed, program.chosen, strict=True
    ):
        if cost.trained_states or cost.product_flops or cost.param_bytes < _LARGE_BYTES:
            continue
        for place, variable in zip(placed, chosen[len(treated) :], strict=True):
            if place.num_moved_states is not None and _mixes(place):
                plain = replace(place, num_moved_states=None, other_states=Optimizer.DEVICE)
                if {plain, replace(plain, optimizer=place.other_states)} <= set(placed):
                    found.add(variable.index)
    return found


def _mixes(place: BlockDecision) -> bool:
    """Whether a place is no better than shares of those whose states are all moved alike, or not at all.

    Smaller tensors are moved first, so the ones that are moved have more than their share of latencies. Updates on the host take
    as long as computation or the disk, whichever is longer, which a mixture of host and disk is faster at.
    """
    kinds = place.optimizer, place.other_states
    return kinds[1] is Optimizer.DEVICE or kinds == (Optimizer.HOST, Optimizer.STREAMED)


def _model(
    program: Program, *, whole: Sequence[int], without: Collection[int] = ()
) -> tuple[model_builder.Model, list[model_builder.Variable]]:
    """The program in floating point, and its variables in their order; choices of some blocks are whole numbers, and those
    ``without`` are 0."""
    proto = program.model.proto
    units = [program.units.get(variable, 1) for variable in range(len(proto.variables))]
    choices = {x.index for block in whole for x in program.chosen[block]}
    model = model_builder.Model()
    variables = []
    for index, (variable, unit) in enumerate(zip(proto.variables, units, strict=True)):
        domain = list(variable.domain)
        most = 0 if index in without else domain[-1] / unit
        variables.append(model.new_var(domain[0] / unit, most, index in choices, variable.name))
    for row in proto.constraints:
        if row.has_exactly_one():
            model.add(model_builder.LinearExpr.sum([variables[i] for i in row.exactly_one.literals]) == 1)
            continue
        indices, coefficients, domain = list(row.linear.vars), list(row.linear.coeffs), list(row.linear.domain)
        unit = max((units[i] for i in indices), default=1)
        if unit == 1:  # a row of choices only
            unit = max(map(abs, coefficients), default=1)
        weights = [coefficient * units[i] / unit for i, coefficient in zip(indices, coefficients, strict=True)]
        total = model_builder.LinearExpr.weighted_sum([variables[i] for i in indices], weights)
        if domain[0] > -_INFINITE and indices:
            model.add(total >= domain[0] / unit)
        if domain[-1] < _INFINITE and indices:
            model.add(total <= domain[-1] / unit)
    objective = proto.objective
    indices, coefficients = list(objective.vars), list(objective.coeffs)
    weights = [coefficient * units[i] / TICKS for i, coefficient in zip(indices, coefficients, strict=True)]
    model.minimize(model_builder.LinearExpr.weighted_sum([variables[i] for i in indices], weights))
    return model, variables
