"""Plan and rewrite a training graph: group, profile, solve, partition, insert copies.

In: a captured graph and its joint forward and backward graph. Out: a `TrainingStep`, which is the rewritten pair with
the plan behind it. A trace of the rewritten graphs checks the plan: where it is above the budget, the problem is
solved again with the difference taken off.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autohete_fx import passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Compilation, GraphText, Share, lane_events
from autohete_fx.compiler.problem import owners_of
from autohete_fx.compiler.together import Together
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.graph.saved import offloadable
from autohete_fx.internals.configs import functorch_config
from autohete_fx.ir import BlockDecision, BlockGraph, Plan, Problem, Profile
from autohete_fx.ir.labels import labels_of
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.passes import PassContext, Stage
from autohete_fx.planner import given
from autohete_fx.planner.infeasible import advice_of, broken_up, too_small
from autohete_fx.planner.model.footprint import footprint_of, traced_peak_bytes
from autohete_fx.planner.sharing import leanest
from autohete_fx.profiler import Partition, profile_analytic, profile_measured, trace_step
from autohete_fx.report.graph_text import graph_text, list_transfers

_MAX_CORRECTIONS = 8
_RESERVE = 1 / 64
"""A traced peak may be wrong by this share of the budget. Plans leave it free, so that their code rarely has to be compiled
again. Where a plan that moves nothing is above the budget by no more, the trace sets no limit: what was compiled will tell."""
_WORST_TRACE = 1 / 8
"""No trace has been further above what the compiled code takes than by this share: only where it is further above the budget is
that refused before anything is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """A rewritten forward and backward.

    Attributes:
        graphs: the pair, and how many outputs of forward are the user's.
        contexts: of forward and backward, which the last pass needs again.
        compilation: what the user can look at.
        problem: what the plan solves.
        refusal: set where no plan's trace keeps the budget and this is the plan of least peak: the error to raise if its
            compiled code does not keep the budget either, or cannot be measured.
    """

    graphs: rewriting.Partitioned
    contexts: tuple[PassContext, PassContext]
    compilation: Compilation
    problem: Problem
    refusal: InfeasiblePlanError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rewritten:
    """A plan, whose peak is the traced one, and the graphs that it was written into."""

    plan: Plan
    problem: Problem
    graphs: rewriting.Partitioned
    contexts: tuple[PassContext, PassContext]
    refusal: InfeasiblePlanError | None = None


class TrainingPlanner:
    """One joint graph on its way to a `TrainingStep`.

    Args:
        captured: the graph's surroundings.
        joint: the joint graph; consumed.
        joint_inputs, keywords: what AOTAutograd gives a partitioner.
        given: a plan to replay instead of solving.
        shares: where it is given, what was decided with it for earlier graphs of the call.
        withheld_bytes: how much less than the budget the plan may use.
        seconds: by stage, what earlier compilations of the graph took; what this one takes is added.
    """

    def __init__(
        self,
        captured: CapturedGraph,
        joint: fx.GraphModule,
        joint_inputs: Sequence[object],
        keywords: dict[str, object],
        *,
        given: Plan | None,
        shares: tuple[Share, ...] = (),
        withheld_bytes: int,
        seconds: dict[str, float],
    ) -> None:
        self.captured = captured
        self.options = captured.options
        unplanned = PassContext(stage=Stage.JOINT, plan=Plan(labels=(), decisions=()))
        self.joint = rewriting.run_user_passes(self.options.passes.joint, joint, unplanned)
        rewriting.separate_written_inputs(self.joint)
        self.joint_inputs = joint_inputs
        self.keywords = keywords
        self.given = given
        self.withheld_bytes = withheld_bytes
        self.seconds = seconds
        self.offloadable: tuple[str, ...] = ()
        self.shares = shares
        self._candidates: list[tuple[BlockDecision, ...]] = []
        self._takes_least = False
        with self._timed("grouping"):
            self.blocks: BlockGraph = group_blocks(self.joint, parameter_fqns(self.joint, captured.inputs))

    def run(self, *, may_measure: bool) -> TrainingStep:
        """Profile, plan and rewrite. ``may_measure``: whether timing blocks on the device is worth its while."""
        original = rewriting.copy_graph(self.joint)
        split = self._split(self.joint, rewriting.keep_everything(labels_of(self.blocks.blocks)))
        with self._timed("profiling"):
            profile = self._profile(split, may_measure)
        self.offloadable = tuple(node.name for node in offloadable(split.forward, split.num_outputs))
        before = (graph_text(split.forward), graph_text(split.backward))
        try:
            made = self._planned_beside(profile, split, original)
        except InfeasiblePlanError as error:
            raise broken_up(error, self.captured.model.shares.graph_breaks) from error
        problem = made.problem
        plan, split, contexts = made.plan, made.graphs, made.contexts
        theirs = self.options.passes
        split.forward = rewriting.run_user_passes(theirs.forward, split.forward, contexts[0])
        split.backward = rewriting.run_user_passes(theirs.backward, split.backward, contexts[1])
        compilation = self._report(problem, plan, profile, before, split)
        refusal = made.refusal and broken_up(made.refusal, self.captured.model.shares.graph_breaks)
        return TrainingStep(graphs=split, contexts=contexts, compilation=compilation, problem=problem, refusal=refusal)

    def _split(self, joint: fx.GraphModule, plan: Plan) -> rewriting.Partitioned:
        context = PassContext(stage=Stage.JOINT, plan=plan, block_of=block_index(self.blocks))
        return rewriting.partition(joint, self.joint_inputs, context, self.keywords, self.options.verify)

    def _unplanned(self, stage: Stage) -> PassContext:
        """The context of a graph that no decision has changed."""
        return PassContext(stage=stage, plan=rewriting.keep_everything(labels_of(self.blocks.blocks)))

    def _profile(self, split: rewriting.Partitioned, may_measure: bool) -> Profile:
        partition = Partition(
            forward=split.forward,
            backward=split.backward,
            num_outputs=split.num_outputs,
            blocks=self.blocks,
            block_of=block_index(self.blocks),
            params=self.captured.param_infos(split.forward),
            inner_backend=self.options.inner_backend,
            after=passes.regions_apart(split.backward, self._unplanned(Stage.BACKWARD)),
        )
        machine = self.captured.machine
        if may_measure and self.options.profile == "measured" and self.captured.budget_bytes is not None:
            profile = profile_measured(partition, machine, max_bytes=self.captured.free_bytes())
        else:
            profile = profile_analytic(partition, machine)
        return self.captured.agreement.slowest(profile)

    def _planned_beside(self, profile: Profile, split: rewriting.Partitioned, original: fx.GraphModule) -> _Rewritten:
        """Within the budget, as one graph of its call: see `autohete_fx.compiler.shares`."""
        captured, budget = self.captured, self.captured.budget_bytes
        problem = captured.problem(self.blocks, profile, training=True)
        if captured.is_unsettled:
            return self._unsettled(problem, split, original)
        if captured.decided is not None:
            self._candidates = [captured.decided.decisions, captured.decided.least]
        together = Together(captured, problem)
        if not together.others or budget is None:
            return self._planned(problem, split, original)
        if self.given is not None:  # found in the cache, with what was decided for the others
            captured.others_bytes = together.beside(self.shares) if self.shares else together.beside_least()
            return self._planned(captured.problem(self.blocks, profile, training=True), split, original)
        with self._timed("solving"):
            allowed = int((budget - self.withheld_bytes) * (1 - _RESERVE))
            best = captured.agreement.first("plan of all graphs", lambda: together.best(allowed))
        if best is not None:
            self.shares, own = best
            self._candidates = [own]
            captured.others_bytes = together.beside(self.shares)
            made = self._tried(captured.problem(self.blocks, profile, training=True), split, original)
            if made is not None and together.peak_beside(made.plan.decisions) <= budget:
                return made
            split = self._split(rewriting.copy_graph(original), rewriting.keep_everything(problem.labels))
        self.shares = ()
        captured.others_bytes = together.beside_least()
        problem = captured.problem(self.blocks, profile, training=True)
        least = leanest(problem, deadline=time.monotonic())
        self._candidates = [] if least is None else [least]
        made = self._planned(dataclasses.replace(problem, device_budget_bytes=None), split, original)
        made = dataclasses.replace(made, problem=problem)
        needed = max(made.plan.peak_bytes, together.peak_beside(made.plan.decisions))
        if needed > budget - self.withheld_bytes:
            smallest = int(needed / (1 - _RESERVE)) + 1 + self.withheld_bytes
            what = f"The plans that take least need {format_bytes(needed)}"
            raise too_small(budget, smallest, what, advice=advice_of(problem))
        return made

    def _unsettled(self, problem: Problem, split: rewriting.Partitioned, original: fx.GraphModule) -> _Rewritten:
        """The plan that takes least, even if it does not fit: what would do is known when the last graph of the call is."""
        self._takes_least = True
        made = self._tried(problem, split, original)
        if made is None:
            split = self._split(rewriting.copy_graph(original), rewriting.keep_everything(problem.labels))
            least = leanest(problem, deadline=time.monotonic())
            self._candidates = [] if least is None else [least]
            made = self._planned(dataclasses.replace(problem, device_budget_bytes=None), split, original)
        return dataclasses.replace(made, problem=problem)

    def _tried(self, problem: Problem, split: rewriting.Partitioned, original: fx.GraphModule) -> _Rewritten | None:
        try:
            made = self._planned(problem, split, original)
        except InfeasiblePlanError:
            return None
        return made if made.refusal is None else None

    def _planned(self, problem: Problem, split: rewriting.Partitioned, original: fx.GraphModule) -> _Rewritten:
        """Plan and rewrite until the traced peak of the rewritten graphs keeps the budget.

        Where no plan does, the one of least traced peak is returned, with the error to raise if its compiled code does not
        keep the budget either. Where its trace is far above the budget, the error is raised at once.
        """
        usable = allowed = None if problem.device_budget_bytes is None else self._usable_bytes(problem, split)
        fresh: rewriting.Partitioned | None = split
        refused: InfeasiblePlanError | None = None
        for _ in range(_MAX_CORRECTIONS):
            try:
                plan = self._plan(dataclasses.replace(problem, device_budget_bytes=allowed))
            except InfeasiblePlanError as error:
                if refused is not None or error.smallest_budget_bytes is None:
                    raise
                # Corrections may have gone below what is possible: see what the plan of least peak really needs.
                refused, allowed = error, error.smallest_budget_bytes
                continue
            made = self._made(problem, plan, original, fresh)
            fresh = None  # consumed by the rewrite
            if usable is None or allowed is None or made.plan.peak_bytes <= usable:
                return made
            if self._candidates:
                continue
            if refused is not None or self.given is not None:
                break
            allowed = min(allowed, plan.peak_bytes) - (made.plan.peak_bytes - usable) - allowed // 1000
        if self.given is None and problem.allow_recompute:
            # The planner adds up blocks; recomputing all of them may need less than what it takes for the least.
            everything = self._made(problem, given.recomputing(made.plan, problem), original, None)
            made = min(made, everything, key=lambda each: each.plan.peak_bytes)
        assert self.captured.budget_bytes is not None and usable is not None
        peak = made.plan.peak_bytes
        if peak <= usable:
            return made
        refusal = too_small(
            self.captured.budget_bytes,
            int(peak / (1 - _RESERVE)) + 1 + self.withheld_bytes,
            refused.held_up_by if refused else f"The plan needs {format_bytes(peak)}",
            smallest_host_bytes=refused.smallest_host_budget_bytes if refused else None,
            advice=advice_of(problem),
        )
        if self.given is not None or peak * (1 - _WORST_TRACE) > self.captured.budget_bytes:
            raise refusal
        return dataclasses.replace(made, refusal=refusal)

    def _made(
        self, problem: Problem, plan: Plan, original: fx.GraphModule, split: rewriting.Partitioned | None
    ) -> _Rewritten:
        """The graphs of a plan; ``split``: the partition that changes nothing, where it is still there to be rewritten."""
        with self._timed("rewriting"):
            if split is None or rewriting.changes_code(plan):
                split = self._split(rewriting.copy_graph(original), plan)
            contexts = self._rewrite(split, plan)
            peak = self._traced_peak(problem, plan, split, contexts)
            peak = self.captured.agreement.most("traced peak", peak)
        plan = dataclasses.replace(plan, peak_bytes=peak)
        return _Rewritten(plan=plan, problem=problem, graphs=split, contexts=contexts)

    def _usable_bytes(self, problem: Problem, split: rewriting.Partitioned) -> int | None:
        """What a traced peak may be; None for no limit."""
        budget = self.captured.budget_bytes
        if budget is None or self.given is not None:
            return budget
        if not self.withheld_bytes and self.options.inner_backend != "eager":
            neutral = rewriting.keep_everything(problem.labels)
            if self._traced_peak(problem, neutral, split) <= budget * (1 + _RESERVE):
                return None  # what was compiled will tell
        return int((budget - self.withheld_bytes) * (1 - _RESERVE))

    def _plan(self, problem: Problem) -> Plan:
        if self.given is not None:
            return given.fitted_plan(self.given, self.blocks, problem)
        with self._timed("solving"):
            self._candidates = [decisions for decisions in self._candidates if len(decisions) == len(problem.costs)]
            if self._candidates:
                return given.decided_plan(problem, self.blocks, self._candidates.pop(0))
            return self.captured.agreement.first("plan", lambda: self._solved(problem))

    def _solved(self, problem: Problem) -> Plan:
        if self._takes_least:
            return given.lean_plan(problem, self.blocks)
        try:
            return given.solved_plan(problem, self.blocks, time_limit_s=self.options.solver_time_limit_s)
        except InfeasiblePlanError:
            if not problem.fixed_decisions:
                raise
            # Parameters placed for an earlier graph of the model leave no plan: move them, which is always exact.
            free = dataclasses.replace(problem, fixed_decisions=())
            return given.solved_plan(free, self.blocks, time_limit_s=self.options.solver_time_limit_s)

    def _rewrite(self, split: rewriting.Partitioned, plan: Plan) -> tuple[PassContext, PassContext]:
        return rewriting.rewrite_training(
            split,
            plan,
            self.captured.model.session.digest,
            self.captured.inputs,
            owners_of(self.blocks, self.captured.params),
            self.options.verify,
            offloadable=self.offloadable,
        )

    def _traced_peak(
        self,
        problem: Problem,
        plan: Plan,
        split: rewriting.Partitioned,
        contexts: tuple[PassContext, PassContext] | None = None,
    ) -> int:
        """``contexts``: with which the graphs were rewritten."""
        offloads = contexts is not None and bool(contexts[0].offloaded)
        trace = trace_step(
            split.forward,
            split.backward,
            split.num_outputs,
            device_type=self.captured.device.type,
            inner_backend=self.options.inner_backend,
            donates=functorch_config.donated_buffer and not offloads,
            after=passes.pinned_after(split.backward, contexts[1]) if contexts else None,
        )
        return traced_peak_bytes(problem, plan, trace.peak_bytes)

    def _report(
        self, problem: Problem, plan: Plan, profile: Profile, before: tuple[str, str], split: rewriting.Partitioned
    ) -> Compilation:
        small_bytes = self.captured.small_bytes(training=True)
        footprint = footprint_of(problem, plan.decisions)
        alone = dataclasses.replace(problem, fixed_bytes=problem.fixed_bytes - self.captured.others_bytes)
        return Compilation(
            plan=plan,
            training=True,
            device_budget_bytes=self.captured.budget_bytes,
            owners=owners_of(self.blocks, self.captured.params),
            footprint=dataclasses.replace(footprint, resident_bytes=footprint.resident_bytes + small_bytes),
            shares=self.shares,
            unsettled=alone if self.captured.is_unsettled else None,
            graphs=(
                GraphText(graph="forward", before=before[0], after=graph_text(split.forward)),
                GraphText(graph="backward", before=before[1], after=graph_text(split.backward)),
            ),
            transfers=(*list_transfers(split.forward, "forward"), *list_transfers(split.backward, "backward")),
            events=lane_events(problem, plan),
            notes=self.captured.notes(),
            profile_source=profile.source,
            compile_s=dict(self.seconds),
        )

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
