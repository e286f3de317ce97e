"""Rewrite a graph that is compiled under ``no_grad``: fetch the parameters that live in host memory.

In: a captured graph and its ATen form. Out: the graph, rewritten in place, and its `Planned`. Where a training graph has placed
the parameters they stay, and what training has on the device beside them is counted. Else they are placed for inference, within
the budget as far as a trace of the rewritten graph can tell (`autohete_fx.compiler.fitting`).
"""

import dataclasses

from torch import fx

from autohete_fx import passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Compilation, GraphText, replayed
from autohete_fx.compiler.fitting import Budget, Planned, Rewritten, fitted
from autohete_fx.compiler.problem import moved_states, owners_of
from autohete_fx.graph.saved import output_args
from autohete_fx.ir import BlockDecision, Plan, Problem
from autohete_fx.passes import PIPELINE, PassContext, Stage
from autohete_fx.planner.given import fitted_plan, solved_plan
from autohete_fx.planner.model.footprint import traced_peak_bytes
from autohete_fx.profiler import Partition, profile_analytic, trace_step
from autohete_fx.report.graph_text import graph_text, list_transfers
from autohete_fx.report.stages import Stages, blocks_words, plan_words


class InferencePlanner:
    """One graph without a backward on its way to a `Planned`.

    Args:
        captured: the graph's surroundings.
        gm: its ATen form.
        given: a plan to replay where nothing has decided yet, instead of solving.
        budget: None for no limit.
        stages: where what is under way is told; tracing is.
    """

    def __init__(
        self, captured: CapturedGraph, gm: fx.GraphModule, *, given: Plan | None, budget: Budget | None, stages: Stages
    ) -> None:
        self.captured = captured
        self.gm = gm
        self.given = given
        self.budget = budget
        self.stages = stages
        self.num_outputs = len(output_args(gm))
        self.blocks = group_blocks(gm, parameter_fqns(gm, captured.inputs))
        self.owners = owners_of(self.blocks, captured.params)

    def run(self) -> Planned:
        """Plan where parameters live if nothing has yet, and insert their fetches."""
        self.stages.end(blocks_words(self.blocks))
        self.stages.begin("planning")
        profile = profile_analytic(self._partition(), self.captured.machine)
        problem = self.captured.problem(self.blocks, profile, training=False)
        before, original = graph_text(self.gm), rewriting.copy_graph(self.gm)
        found = self._planned(problem, original)
        made = dataclasses.replace(self._made(found.problem, found.plan, self.gm), refusal=found.refusal)
        self.stages.end(plan_words(made.plan, self.captured.budget_bytes))
        replay = replayed(made.problem, made.plan)
        compilation = Compilation(
            plan=made.plan,
            training=False,
            device_budget_bytes=self.captured.budget_bytes,
            owners=self.owners,
            moved=made.moved,
            graphs=(GraphText(graph="inference", before=before, after=graph_text(self.gm)),),
            transfers=list_transfers(self.gm, "inference"),
            problem=made.problem,
            events=replay.events,
            levels=replay.levels,
            profile_source=profile.source,
        )
        return Planned(rewritten=made, compilation=compilation)

    def _partition(self) -> Partition:
        infos = self.captured.param_infos(self.gm)
        return Partition(
            forward=self.gm,
            backward=None,
            num_outputs=self.num_outputs,
            blocks=self.blocks,
            block_of=block_index(self.blocks),
            params={name: dataclasses.replace(info, state_bytes=0) for name, info in infos.items()},
            inner_backend=self.captured.options.inner_backend,
        )

    def _planned(self, problem: Problem, original: fx.GraphModule) -> Rewritten:
        def rewrite(plan: Plan) -> Rewritten:
            return self._made(problem, plan, rewriting.copy_graph(original))

        given = self.given
        if self.captured.model.is_placed:
            decisions = tuple(d or BlockDecision() for d in problem.fixed_decisions)
            decisions = decisions or (BlockDecision(),) * len(problem.costs)
            given = Plan(labels=problem.labels, decisions=decisions, schedule=problem.schedule)
        if given is not None:
            return rewrite(fitted_plan(given, self.blocks, problem, is_own=given is self.given))
        problem = dataclasses.replace(problem, fixed_decisions=())

        def solve(limited: Problem) -> Plan:
            limit_s = self.captured.options.solver_time_limit_s
            agreement = self.captured.agreement
            return agreement.first("plan", lambda: solved_plan(limited, self.blocks, time_limit_s=limit_s))

        usable = None if self.budget is None else self.budget.usable_bytes
        return fitted(problem, self.budget, usable, [solve], rewrite)

    def _made(self, problem: Problem, plan: Plan, gm: fx.GraphModule) -> Rewritten:
        """``gm`` rewritten for a plan, in place."""
        captured = self.captured
        moved = moved_states(plan.decisions, self.owners, captured.params)
        context = PassContext(
            stage=Stage.INFERENCE,
            plan=plan,
            session=captured.model.session.digest,
            block_of=block_index(self.blocks),
            owners=rewriting.owners_by_placeholder(gm, captured.inputs, self.owners),
            staying=rewriting.staying_states(gm, captured.inputs, moved),
            num_outputs=self.num_outputs,
        )
        passes.run(PIPELINE, gm, context, verify_graph=captured.options.verify)
        trace = trace_step(
            gm,
            None,
            self.num_outputs,
            device_type=captured.device.type,
            inner_backend=captured.options.inner_backend,
        )
        peak = captured.agreement.most("traced peak", traced_peak_bytes(problem, plan, trace.peak_bytes))
        return Rewritten(
            plan=dataclasses.replace(plan, peak_bytes=peak),
            problem=problem,
            moved=moved,
            graphs=(gm,),
            contexts=(context,),
        )
