"""Rewrite a graph that is compiled under ``no_grad``: fetch the parameters that live in host memory.

In: a captured graph and its ATen form. Out: the graph, rewritten in place, its `Compilation` and the context that the
last pass needs. Where a training graph has placed the parameters they stay; else they are placed for inference.
"""

import dataclasses

from torch import fx

from autohete_fx import passes, planning, rewriting
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import parameter_fqns
from autohete_fx.captured import CapturedGraph
from autohete_fx.compilation import Compilation, GraphText
from autohete_fx.ir import BlockDecision, BlockGraph, Plan, Problem
from autohete_fx.passes import PIPELINE, PassContext, Stage
from autohete_fx.profiler import Partition, profile_analytic
from autohete_fx.report.graph_text import graph_text, list_transfers
from autohete_fx.runtime.placement import moved_states
from autohete_fx.saved import output_args


def rewrite_inference(captured: CapturedGraph, gm: fx.GraphModule) -> tuple[Compilation, PassContext]:
    """Plan where parameters live if nothing has yet, and insert their fetches."""
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
    plan = _plan(captured, problem, blocks)
    owners = planning.owners_of(blocks, captured.params)
    context = PassContext(
        stage=Stage.INFERENCE,
        plan=plan,
        session=captured.model.session.digest,
        block_of=block_index(blocks),
        owners=rewriting.owners_by_placeholder(gm, captured.inputs, owners),
        staying=rewriting.staying_states(gm, captured.inputs, moved_states(plan.decisions, owners, captured.params)),
        num_outputs=len(output_args(gm)),
    )
    before = graph_text(gm)
    passes.run(PIPELINE, gm, context, verify_graph=captured.options.verify)
    compilation = Compilation(
        plan=plan,
        training=False,
        device_budget_bytes=captured.budget_bytes,
        owners=owners,
        graphs=(GraphText(graph="inference", before=before, after=graph_text(gm)),),
        transfers=list_transfers(gm, "inference"),
        events=planning.lane_events(problem, plan),
        profile_source=profile.source,
    )
    return compilation, context


def _plan(captured: CapturedGraph, problem: Problem, blocks: BlockGraph) -> Plan:
    if not captured.model.is_placed:
        return planning.solved_plan(dataclasses.replace(problem, fixed_decisions=()), blocks, captured.options)
    count = len(blocks.blocks)
    decisions = tuple(d or BlockDecision() for d in problem.fixed_decisions) or (BlockDecision(),) * count
    return planning.fitted_plan(
        Plan(labels=problem.labels, decisions=decisions, schedule=problem.schedule), blocks, problem
    )
