"""Plan and rewrite a training graph: group, profile, solve, partition, insert copies.

In: a captured graph and its joint forward and backward graph. Out: a `Planned`, which is the rewritten pair with the plan that it
was rewritten for. A trace of the rewritten graphs checks the plan (`autohete_fx.compiler.fitting`).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from autohete_fx import passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Compilation, GraphText, Share, replayed
from autohete_fx.compiler.fitting import Budget, Planned, Rewritten, fitted
from autohete_fx.compiler.problem import NOTE_ON_UNAGREED, moved_states, never_computing_again, owners_of
from autohete_fx.compiler.together import Together
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.graph.collectives import starts_functional
from autohete_fx.graph.saved import offloadable
from autohete_fx.internals.configs import functorch_config
from autohete_fx.ir import BlockDecision, BlockGraph, Plan, Problem, Profile
from autohete_fx.ir.labels import labels_of
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.options import Options
from autohete_fx.passes import PassContext, Stage
from autohete_fx.planner import given
from autohete_fx.planner.infeasible import advice_of, broken_up, too_small
from autohete_fx.planner.model.footprint import footprint_of, traced_peak_bytes
from autohete_fx.planner.sharing import leanest
from autohete_fx.profiler import Partition, StepTrace, profile_analytic, profile_measured, trace_step
from autohete_fx.report.graph_text import graph_text, list_transfers
from autohete_fx.report.stages import Stages, blocks_words, plan_words

Decisions = tuple[BlockDecision, ...]

_CORRECTION_SHARE = 0.4
"""The share of the time limit for a graph's later problems, which have budgets that differ by a few hundredths."""
_TIMED_FROM_S = 0.1
"""On a CPU device the blocks of a shorter step, as estimated, are not timed unless the options say so. A plan that is a tenth
better for it would take more than a thousand steps to make up for the seconds that it takes to compile them by themselves.
Accelerators run such steps by the hundred thousand."""


def is_worth_timing(options: Options, estimated: Profile, device_type: str) -> bool:
    """Whether to time blocks, which compiles each distinct one by itself; ``estimated`` are their costs without that."""
    passes_s = options.micro_batches * sum(cost.forward_s + cost.backward_s for cost in estimated.costs)
    is_long = device_type != "cpu" or passes_s >= _TIMED_FROM_S
    return options.profile == "measured" or (options.profile == "auto" and is_long)


class TrainingPlanner:
    """One joint graph on its way to a `Planned`.

    Args:
        captured: the graph's surroundings.
        joint: the joint graph.
        joint_inputs, keywords: what AOTAutograd gives a partitioner.
        given: a plan to replay instead of solving.
        shares: where it is given, what was decided with it for earlier graphs of the call.
        budget: None for no limit.
        seconds: by stage, what earlier compilations of the graph took; what this one takes is added.
        stages: where what is under way is told; tracing is.
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
        budget: Budget | None,
        seconds: dict[str, float],
        stages: Stages,
    ) -> None:
        self.captured = captured
        self.options = captured.options
        unplanned = PassContext(stage=Stage.JOINT, plan=Plan(labels=(), decisions=()))
        self.joint = rewriting.run_user_passes(self.options.passes.joint, joint, unplanned)
        rewriting.separate_written_inputs(self.joint)
        self.joint_inputs = joint_inputs
        self.keywords = keywords
        self.given = given
        self.budget = budget
        self.seconds = seconds
        self.stages = stages
        self.offloadable: tuple[str, ...] = ()
        self.shares = shares
        with self._timed("grouping"):
            self.blocks: BlockGraph = group_blocks(self.joint, parameter_fqns(self.joint, captured.inputs))
        self.owners = owners_of(self.blocks, captured.params)
        self._splits: dict[tuple[object, ...], rewriting.Partitioned] = {}  # by what decides them, not rewritten
        self._unchanged_bytes = 0
        self._solved: list[Decisions] = []

    def run(self, *, may_measure: bool) -> Planned:
        """Profile, plan and rewrite. ``may_measure``: whether timing blocks on the device is worth its while."""
        split = self._split(rewriting.keep_everything(labels_of(self.blocks.blocks)))
        self.stages.end(blocks_words(self.blocks))
        self.stages.begin("profiling")
        with self._timed("profiling"):
            profile = self._profile(split, may_measure)
        self.stages.end(profile.source)
        self.stages.begin("planning")
        self.offloadable = tuple(node.name for node in offloadable(split.forward, split.num_outputs))
        before = (graph_text(split.forward), graph_text(split.backward))
        self._unchanged_bytes = self._peak_of(self._traced(split))
        breaks = self.captured.model.shares.graph_breaks
        try:
            made = self._planned_beside(profile)
        except InfeasiblePlanError as error:
            raise broken_up(error, breaks) from error
        theirs = (self.options.passes.forward, self.options.passes.backward)
        graphs = tuple(map(rewriting.run_user_passes, theirs, made.graphs, made.contexts))
        refusal = made.refusal and broken_up(made.refusal, breaks)
        made = dataclasses.replace(made, graphs=graphs, refusal=refusal)
        self.stages.end(plan_words(made.plan, self.captured.budget_bytes))
        return Planned(rewritten=made, compilation=self._report(made, profile, before))

    def _split(self, plan: Plan) -> rewriting.Partitioned:
        """The joint graph in two parts, which are not to be rewritten. PyTorch's partitioner takes longer than all passes, and
        most plans of one graph recompute alike."""
        key = rewriting.partition_key(plan, gathers=self.captured.agreement.is_shared)
        if key not in self._splits:
            context = PassContext(stage=Stage.JOINT, plan=plan, block_of=block_index(self.blocks))
            joint = rewriting.copy_graph(self.joint)
            self._splits[key] = rewriting.partition(
                joint, self.joint_inputs, context, self.keywords, self.options.verify
            )
        return self._splits[key]

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
        profile = profile_analytic(partition, machine)
        has_budget, device_type = self.captured.budget_bytes is not None, self.captured.device.type
        if may_measure and has_budget and is_worth_timing(self.options, profile, device_type):
            profile = profile_measured(partition, machine, max_bytes=self.captured.free_bytes())
        return self.captured.agreement.slowest(profile)

    def _problem(self, profile: Profile) -> Problem:
        """What is to be solved now."""
        problem = self.captured.problem(self.blocks, profile, training=True)
        return never_computing_again(problem) if self._has_unagreed else problem

    @functools.cached_property
    def _has_unagreed(self) -> bool:
        """Whether the graph has collectives of ranks that no parameter tells of. Each plans for itself, and if one recomputed a
        collective and another did not, both would wait for ever."""
        targets = (node.target for node in self.joint.graph.nodes)
        return not self.captured.agreement.is_shared and any(map(starts_functional, targets))

    def _planned_beside(self, profile: Profile) -> Rewritten:
        """Within the budget, as one graph of its call: see `autohete_fx.compiler.shares`."""
        captured, budget = self.captured, self.budget
        problem = self._problem(profile)
        if captured.is_unsettled:
            return self._unsettled(problem)
        together = Together(captured, problem)
        if not together.others or budget is None:
            decided = captured.decided
            return self._planned(problem, () if decided is None else (decided.decisions, decided.least))
        if self.given is not None:  # found in the cache, with what was decided for the others
            captured.others_bytes = together.beside(self.shares or together.least)
            return self._planned(self._problem(profile))
        with self._timed("solving"):
            best = captured.agreement.first("plan of all graphs", lambda: together.best(budget.usable_bytes))
        if best is not None:
            self.shares, own = best
            captured.others_bytes = together.beside(self.shares)
            made = self._tried(self._problem(profile), (own,))
            if made is not None and together.peak_beside(made.plan.decisions, self.shares) <= budget.device_bytes:
                return made
        least = together.least
        # In the call itself they are compiled already.
        self.shares = least if captured.model.shares.is_call_over else ()
        captured.others_bytes = together.beside(least)
        made = self._leanest(self._problem(profile))
        needed = max(made.plan.peak_bytes, together.peak_beside(made.plan.decisions, least))
        if needed > budget.device_bytes - budget.withheld_bytes:
            what = f"The plans that take least need {format_bytes(needed)}"
            advice = advice_of(made.problem, *(other.problem for other in together.others.values()))
            raise too_small(budget.device_bytes, budget.enough_for(needed), what, advice=advice)
        return made

    def _unsettled(self, problem: Problem) -> Rewritten:
        """The plan that takes least, even if it does not fit: what would do is known when the last graph of the call is.

        It leaves room for what no graph has read so far, and for what these will have on the device that no plan moves, as long as
        any plan does.
        """
        rest_bytes = self.captured.crowding_bytes
        crowded = dataclasses.replace(problem, fixed_bytes=problem.fixed_bytes + rest_bytes)
        made = self._tried(crowded, takes_least=True) or self._leanest(crowded)
        plan = dataclasses.replace(made.plan, peak_bytes=made.plan.peak_bytes - rest_bytes)
        return dataclasses.replace(made, plan=plan, problem=problem)

    def _leanest(self, problem: Problem) -> Rewritten:
        """The plan that takes least, whatever the budget."""
        least = leanest(problem, deadline=time.monotonic())
        unlimited = dataclasses.replace(problem, device_budget_bytes=None)
        made = self._planned(unlimited, () if least is None else (least,), takes_least=True)
        return dataclasses.replace(made, problem=problem)

    def _tried(self, problem: Problem, candidates: Sequence[Decisions] = (), **how: bool) -> Rewritten | None:
        try:
            made = self._planned(problem, candidates, **how)
        except InfeasiblePlanError:
            return None
        return made if made.refusal is None else None

    def _planned(
        self, problem: Problem, candidates: Sequence[Decisions] = (), *, takes_least: bool = False
    ) -> Rewritten:
        """Within the problem's budget as far as a trace can tell: under the first of the candidates that keeps it, which may be of
        another number of blocks, or else as solved."""
        ways: list[Callable[[Problem], Plan]] = [
            functools.partial(self._timed_plan, given.decided_plan, graph=self.blocks, decisions=decisions)
            for decisions in candidates
            if len(decisions) == len(problem.costs)
        ]
        usable = None if problem.device_budget_bytes is None else self._usable_bytes(problem)
        if self.given is not None:
            plan, is_own = self._of_first_rank(self.given), self.options.plan is None
            fixed = functools.partial(given.fitted_plan, plan, self.blocks, is_own=is_own)
            return fitted(problem, self.budget, usable, [fixed], functools.partial(self._made, problem), is_given=True)
        ways.append(functools.partial(self._timed_plan, self._lean_plan if takes_least else self._agreed_plan))
        return fitted(problem, self.budget, usable, ways, functools.partial(self._made, problem))

    def _made(self, problem: Problem, plan: Plan) -> Rewritten:
        """The graphs of a plan."""
        with self._timed("rewriting"):
            split = rewriting.copied(self._split(plan))
            moved = moved_states(plan.decisions, self.owners, self.captured.params)
            contexts = rewriting.rewrite_training(
                split,
                plan,
                self.captured.model.session.digest,
                self.captured.inputs,
                self.owners,
                moved,
                self.options.verify,
                offloadable=self.offloadable,
                awaited=self.captured.awaited,
            )
            trace = self._traced(split, contexts)
            peak = traced_peak_bytes(problem, plan, self._peak_of(trace))
            peak = self.captured.agreement.most("traced peak", peak)
        return Rewritten(
            plan=dataclasses.replace(plan, peak_bytes=peak),
            problem=problem,
            moved=moved,
            graphs=(split.forward, split.backward),
            contexts=contexts,
            between_bytes=trace.forward.end_bytes,
        )

    def _usable_bytes(self, problem: Problem) -> int | None:
        """What a traced peak may be; None for no limit."""
        if self.budget is None:
            return None
        if self.given is not None:
            return self.budget.device_bytes
        neutral = rewriting.keep_everything(problem.labels)
        is_judged = self.options.inner_backend != "eager"
        if is_judged and self.budget.may_suit(traced_peak_bytes(problem, neutral, self._unchanged_bytes)):
            return None
        return self.budget.usable_bytes

    def _timed_plan(self, way: Callable[..., Plan], problem: Problem, **rest: object) -> Plan:
        with self._timed("solving"):
            return way(problem, **rest)

    def _lean_plan(self, problem: Problem) -> Plan:
        return self._of_first_rank(self.captured.agreement.first("plan", lambda: given.lean_plan(problem, self.blocks)))

    def _agreed_plan(self, problem: Problem) -> Plan:
        return self._of_first_rank(self.captured.agreement.first("plan", lambda: self._solved_plan(problem)))

    def _of_first_rank(self, plan: Plan) -> Plan:
        """A plan that the first rank made for its blocks, for those of this rank, which may have other constants."""
        own = tuple(block.digest for block in self.blocks.blocks)
        first = self.captured.agreement.first("blocks", lambda: own)
        return dataclasses.replace(plan, block_digests=own) if plan.block_digests == first else plan

    def _solved_plan(self, problem: Problem) -> Plan:
        """What differs a little from a problem that was solved is solved in less time, from its plan."""
        limit_s = self.options.solver_time_limit_s * (_CORRECTION_SHARE if self._solved else 1)
        how: dict[str, Any] = {"time_limit_s": limit_s, "near": tuple(self._solved)}
        try:
            plan = given.solved_plan(problem, self.blocks, **how)
        except InfeasiblePlanError:
            if not problem.fixed_decisions:
                raise
            # Parameters placed for an earlier graph of the model leave no plan: move them, which is always exact.
            plan = given.solved_plan(dataclasses.replace(problem, fixed_decisions=()), self.blocks, **how)
        self._solved.append(plan.decisions)
        return plan

    def _peak_of(self, trace: StepTrace) -> int:
        """Peak of a pair's intermediates, with what code outside takes between them."""
        return max(trace.peak_bytes, trace.forward.end_bytes + self.captured.outside.peak_bytes)

    def _traced(
        self, split: rewriting.Partitioned, contexts: tuple[PassContext, PassContext] | None = None
    ) -> StepTrace:
        """A pair's intermediates over time. ``contexts``: with which the graphs were rewritten."""
        offloads = contexts is not None and bool(contexts[0].offloaded)
        return trace_step(
            split.forward,
            split.backward,
            split.num_outputs,
            device_type=self.captured.device.type,
            inner_backend=self.options.inner_backend,
            donates=functorch_config.donated_buffer and not offloads,
            after=passes.pinned_after(split.backward, contexts[1]) if contexts else None,
        )

    def _report(self, made: Rewritten, profile: Profile, before: tuple[str, str]) -> Compilation:
        problem, plan, (forward, backward) = made.problem, made.plan, made.graphs
        footprint = footprint_of(problem, plan.decisions)
        resident = footprint.resident_bytes + self.captured.small_bytes(training=True)
        alone = dataclasses.replace(problem, fixed_bytes=problem.fixed_bytes - self.captured.others_bytes)
        replay = replayed(problem, plan)
        return Compilation(
            plan=plan,
            training=True,
            device_budget_bytes=self.captured.budget_bytes,
            owners=self.owners,
            moved=made.moved,
            footprint=dataclasses.replace(footprint, resident_bytes=resident),
            between_bytes=made.between_bytes,
            shares=self.shares,
            unsettled=alone if self.captured.is_unsettled else None,
            graphs=(
                GraphText(graph="forward", before=before[0], after=graph_text(forward)),
                GraphText(graph="backward", before=before[1], after=graph_text(backward)),
            ),
            transfers=(*list_transfers(forward, "forward"), *list_transfers(backward, "backward")),
            problem=problem,
            events=replay.events,
            levels=replay.levels,
            notes=(*self.captured.notes(), *((NOTE_ON_UNAGREED,) if self._has_unagreed else ())),
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
