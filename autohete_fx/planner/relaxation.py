"""The linear relaxation of an integer program: in comes a `Program`, out comes a bound on its objective.

Seconds do for a hundred blocks, identical or not, where branching needs minutes: for many blocks this is the bound, for few
CP-SAT improves on it. OR-Tools' GLOP solves it, in floating point: bytes and times are counted in shares of
what all blocks hold and compute (GLOP does not end on badly scaled rows), and the result is lowered by its tolerance.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder

from autohete_fx.planner.formulation import Program
from autohete_fx.planner.variables import TICKS

_TOLERANCE = 1e-5
_PARAMETERS = "use_dual_simplex: true perturb_costs_in_dual_simplex: true"
"""With many identical blocks the primal simplex may walk in circles for minutes."""
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
    """The relaxation of a program with objective `Program.minimize_step`; None where time ran out."""
    proto = program.model.proto
    units = [program.units.get(variable, 1) for variable in range(len(proto.variables))]
    model = model_builder.Model()
    variables = []
    for variable, unit in zip(proto.variables, units, strict=True):
        domain = list(variable.domain)
        variables.append(model.new_num_var(domain[0] / unit, domain[-1] / unit, variable.name))
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
    solver = model_builder.Solver("GLOP")
    solver.set_solver_specific_parameters(_PARAMETERS)
    solver.set_time_limit_in_seconds(max(_LEAST_S, deadline - time.monotonic()))
    if solver.solve(model) != model_builder.SolveStatus.OPTIMAL:
        return None
    seconds = TICKS * program.tick_s
    chosen = [[variables[x.index] for x in of_block] for of_block in program.chosen]
    shares = (np.array([solver.value(x) for x in of_block]) for of_block in chosen)
    wasted_s = (np.array([max(0.0, solver.reduced_cost(x) * seconds) for x in of_block]) for of_block in chosen)
    bound_s = solver.objective_value * seconds * (1 - _TOLERANCE)
    return Relaxed(bound_s=bound_s, shares=tuple(shares), wasted_s=tuple(wasted_s))
