"""Rewrite a graph that is compiled under ``no_grad``: fetch the parameters that live in host memory.

In: a captured graph and its ATen form. Out: the graph, rewritten in place, and an `InferenceGraph`. Where a training graph has
placed the parameters they stay, and what training has on the device beside them is counted; else they are placed for
inference, within the budget as far as a trace of the rewritten graph can tell.
"""

import dataclasses
import functools
from dataclasses import dataclass

from torch import fx

from autohete_fx import passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Compilation, GraphText, lane_events
from autohete_fx.compiler.problem import owners_of
from autohete_fx.compiler.rewriting import copy_graph
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.graph.saved import output_args
from autohete_fx.ir import BlockDecision, BlockGraph, Plan, Problem
from autohete_fx.passes import PIPELINE, PassContext, Stage
from autohete_fx.planner.given import fitted_plan, solved_plan
from autohete_fx.planner.infeasible import advice_of, too_small
from autohete_fx.planner.model.footprint import traced_peak_bytes
from autohete_fx.profiler import Partition, profile_analytic, trace_step
from autohete_fx.report.graph_text import graph_text, list_transfers
from autohete_fx.runtime.placement import moved_states

_MAX_CORRECTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceGraph:
    """A rewritten inference graph: what the user can look at, what the last pass needs again, and what the plan solves."""

    compilation: Compilation
    context: PassContext
    problem: Problem


def rewrite_inference(
    captured: CapturedGraph, gm: fx.GraphModule, *, given: Plan | None, withheld_bytes: int
) -> InferenceGraph:
    """Plan where parameters live if nothing has yet, and insert their fetches.

    Args:
        given: a plan to replay where nothing has decided yet, instead of solving.
        withheld_bytes: how much less than the budget the plan may use.
    """
    blocks = group_blocks(gm, parameter_fqns(gm, captured.inputs))
    partition = Partition(
        forward=gm,
        backward=None,
        num_outputs=len(output_args(gm)),
        blocks=blocks,
        block_of=block_index(blocks),
        params={n: dataclasses.replace(i, state_bytes=0) for n, i in captured.param_infos(gm).items()},
        inner_backend=captured.options.inner_backend,
    )
    profile = profile_analytic(partition, captured.machine)
    problem = captured.problem(blocks, profile, training=False)
    before = graph_text(gm)
    plan = _plan(captured, problem, blocks, copy_graph(gm), given, withheld_bytes)
    context = _rewrite(captured, gm, blocks, plan)
    compilation = Compilation(
        plan=dataclasses.replace(plan, peak_bytes=_traced_peak(captured, problem, plan, gm)),
        training=False,
        device_budget_bytes=captured.budget_bytes,
        owners=owners_of(blocks, captured.params),
        graphs=(GraphText(graph="inference", before=before, after=graph_text(gm)),),
        transfers=list_transfers(gm, "inference"),
        events=lane_events(problem, plan),
        profile_source=profile.source,
    )
    return InferenceGraph(compilation=compilation, context=context, problem=problem)


def _rewrite(captured: CapturedGraph, gm: fx.GraphModule, blocks: BlockGraph, plan: Plan) -> PassContext:
    owners = owners_of(blocks, captured.params)
    context = PassContext(
        stage=Stage.INFERENCE,
        plan=plan,
        session=captured.model.session.digest,
        block_of=block_index(blocks),
        owners=rewriting.owners_by_placeholder(gm, captured.inputs, owners),
        staying=rewriting.staying_states(gm, captured.inputs, moved_states(plan.decisions, owners, captured.params)),
        num_outputs=len(output_args(gm)),
    )
    passes.run(PIPELINE, gm, context, verify_graph=captured.options.verify)
    return context


def _traced_peak(captured: CapturedGraph, problem: Problem, plan: Plan, gm: fx.GraphModule) -> int:
    trace = trace_step(
        gm,
        None,
        len(output_args(gm)),
        device_type=captured.device.type,
        inner_backend=captured.options.inner_backend,
    )
    return traced_peak_bytes(problem, plan, trace.peak_bytes)


def _plan(
    captured: CapturedGraph,
    problem: Problem,
    blocks: BlockGraph,
    original: fx.GraphModule,
    given: Plan | None,
    withheld_bytes: int,
) -> Plan:
    if captured.model.is_placed:
        count = len(blocks.blocks)
        decisions = tuple(d or BlockDecision() for d in problem.fixed_decisions) or (BlockDecision(),) * count
        placed = Plan(labels=problem.labels, decisions=decisions, schedule=problem.schedule)
        return fitted_plan(placed, blocks, problem)
    if given is not None:
        return fitted_plan(given, blocks, problem)
    problem = dataclasses.replace(problem, fixed_decisions=())
    budget = captured.budget_bytes
    allowed = usable = None if budget is None else budget - withheld_bytes
    for _ in range(_MAX_CORRECTIONS):
        limited = dataclasses.replace(problem, device_budget_bytes=allowed)
        try:
            plan = captured.agreement.first("plan", functools.partial(_solved, captured, limited, blocks))
        except InfeasiblePlanError as error:
            if budget is None or allowed is None or allowed == budget or error.smallest_budget_bytes is None:
                raise
            smallest = error.smallest_budget_bytes + budget - allowed
            raise too_small(budget, smallest, error.held_up_by, advice=advice_of(problem)) from error
        if allowed is None or usable is None:
            break
        gm = copy_graph(original)
        _rewrite(captured, gm, blocks, plan)
        above = captured.agreement.most("traced peak", _traced_peak(captured, problem, plan, gm)) - usable
        if above <= 0:
            break
        allowed = min(allowed, plan.peak_bytes) - above - allowed // 1000
    return plan


def _solved(captured: CapturedGraph, problem: Problem, blocks: BlockGraph) -> Plan:
    return solved_plan(problem, blocks, time_limit_s=captured.options.solver_time_limit_s)
