"""Bounds on the objective of an integer program: in comes a `Program`, out comes what no solution is below.

`relax` leaves out that choices are whole numbers. Seconds do for a hundred blocks, identical or not, where branching needs
minutes. OR-Tools' GLOP solves it. `branch` adds cutting planes and some branching. Models of few blocks need it: the fewer
there are, the more a mixture of two choices gains that none of them has. OR-Tools' SCIP does that; on these programs it proves
in seconds what takes CP-SAT minutes.

Both count in floating point, bytes and times in shares of what all blocks hold and compute (GLOP does not end on badly scaled
rows). Their tolerance lowers the result.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder

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


def relax(program: Program, *, deadline: float) -> Relaxed | None:
    """The relaxation of a program with objective `Program.minimize_step`; None where time ran out, or GLOP has no
    answer."""
    model, variables = _model(program, whole=False)
    solver = model_builder.Solver("GLOP")
    for parameters in (_PARAMETERS, _SECOND_PARAMETERS):
        solver.set_solver_specific_parameters(parameters)
        solver.set_time_limit_in_seconds(max(_LEAST_S, deadline - time.monotonic()))
        status = solver.solve(model)
        if status != model_builder.SolveStatus.ABNORMAL:
            break
    if status != model_builder.SolveStatus.OPTIMAL:
        return None
    seconds = TICKS * program.tick_s
    chosen = [[variables[x.index] for x in of_block] for of_block in program.chosen]
    shares = (np.array([solver.value(x) for x in of_block]) for of_block in chosen)
    wasted_s = (np.array([max(0.0, solver.reduced_cost(x) * seconds) for x in of_block]) for of_block in chosen)
    bound_s = solver.objective_value * seconds * (1 - _TOLERANCE)
    return Relaxed(bound_s=bound_s, shares=tuple(shares), wasted_s=tuple(wasted_s))


def branch(program: Program, *, branches: int, deadline: float) -> float:
    """Seconds that no solution of a program with objective `Program.minimize_step` is below, after so many branches, or at
    ``deadline``.

    0 where none is known by then. Cutting planes do most of it before the first. Other threads run meanwhile.
    """
    model, _ = _model(program, whole=True)
    solver = model_builder.Solver("SCIP")
    solver.set_solver_specific_parameters(f"limits/totalnodes = {branches}\n{_PROVING}")
    solver.set_time_limit_in_seconds(max(_LEAST_S, deadline - time.monotonic()))
    if solver.solve(model) not in (model_builder.SolveStatus.OPTIMAL, model_builder.SolveStatus.FEASIBLE):
        return 0.0
    return solver.best_objective_bound * TICKS * program.tick_s * (1 - _TOLERANCE)


def _model(program: Program, *, whole: bool) -> tuple[model_builder.Model, list[model_builder.Variable]]:
    """The program in floating point, and its variables in their order; choices are whole numbers if asked."""
    proto = program.model.proto
    units = [program.units.get(variable, 1) for variable in range(len(proto.variables))]
    choices = {x.index for of_block in program.chosen for x in of_block} if whole else set()
    model = model_builder.Model()
    variables = []
    for index, (variable, unit) in enumerate(zip(proto.variables, units, strict=True)):
        domain = list(variable.domain)
        variables.append(model.new_var(domain[0] / unit, domain[-1] / unit, index in choices, variable.name))
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
