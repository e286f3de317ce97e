"""Compile one graph: the partitioner, inner compiler and last graph pass that Inductor and AOTAutograd call back.

The order of calls on a cache miss is: `partition` (joint graph; plans and rewrites), `compile_inner` for forward and
for backward, `pin` inside each. An inference graph has no joint graph: `compile_inner` does everything. On a cache hit
none of them runs and `finish` reads the stored `Compilation`.
"""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from autohete_fx import passes, planning, rewriting, versions
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import GraphInput, parameter_fqns
from autohete_fx.compilation import Compilation, Footprint, GraphText, LaneEvent
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.inductor_hooks import LastPass, Partitioner
from autohete_fx.ir import BlockDecision, BlockGraph, Plan, Problem, Profile
from autohete_fx.model import Model, graph_digest, sources_digest
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.options import Options
from autohete_fx.pass_identity import pass_identity
from autohete_fx.passes import PIPELINE, PassContext, Stage
from autohete_fx.passes.base import output_args
from autohete_fx.planner.infeasible import too_small
from autohete_fx.planner.simulate import Simulation
from autohete_fx.profiler import ParamInfo, Partition, profile_analytic, profile_measured
from autohete_fx.profiler.cache import load_text, store_text
from autohete_fx.profiler.liveness import trace_step
from autohete_fx.report.graph_text import graph_text, list_transfers
from autohete_fx.report.sizes import format_bytes
from autohete_fx.resources import device_budget_bytes, host_budget_bytes, is_symbolic, machine_of
from autohete_fx.runtime import kernels  # noqa: F401  (registers the ops' kernels)
from autohete_fx.runtime.placement import Placement, place_param, placement_of
from autohete_fx.runtime.tiers import is_home

_MAX_CORRECTIONS = 8
_RESERVE = 1 / 64
"""Share of the budget that a traced peak leaves free, for what the trace cannot see: kernels' scratch, rounding."""


class GraphCompiler:
    """State of one call of the backend."""

    def __init__(self, *, gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options, model: Model) -> None:
        self.gm = gm
        self.inputs = inputs
        self.options = options
        self.model = model
        self.params: dict[str, torch.nn.Parameter] = {
            i.name: i.tensor for i in inputs if i.is_parameter and isinstance(i.tensor, torch.nn.Parameter)
        }
        self.names = frozenset(self.params)
        self.device = model.session.device
        self.budget_bytes = device_budget_bytes(self.device, options)
        self.machine = machine_of(self.device, model.session)
        self.key = self._key()
        stored = load_text("compilation", self.key)
        self._stored = None if stored is None else Compilation.from_json(stored)
        self.compilation: Compilation | None = None
        self._final_context: PassContext | None = None
        self._seconds: dict[str, float] = {}

    # -- entry and exit -------------------------------------------------------------------------------------------

    def compile(self, example_inputs: Sequence[Any]) -> Any:
        """The compiled graph. Sets ``compilation`` unless the code came from a cache."""
        # The partitioner may turn donated buffers off for this graph alone.
        with functorch_config.patch(donated_buffer=functorch_config.donated_buffer):
            if self.options.inner_backend == "eager":
                return versions.aot_eager(
                    self.gm, example_inputs, partition_fn=self.partition, inference_pass=self._rewrite_inference
                )
            compiled = self._compile_fx(example_inputs)
            if self.compilation is None and self._stored is None:
                # The code was cached but its plan is gone (the cache directories are separate): compile afresh.
                fresh = inductor_config.patch(force_disable_caches=True)
                with functorch_config.patch(enable_autograd_cache=False), fresh:
                    compiled = self._compile_fx(example_inputs)
        return compiled

    def _compile_fx(self, example_inputs: Sequence[Any]) -> Any:
        patches = {
            "custom_partitioner_fn": Partitioner(self.partition, self.key),
            "post_grad_custom_post_pass": LastPass(
                self.pin, self.key, versions.custom_passes(inductor_config.post_grad_custom_post_pass)
            ),
        }
        return compile_fx(self.gm, example_inputs, inner_compile=self.compile_inner, config_patches=patches)

    def look(self, example_inputs: Sequence[Any]) -> Compilation:
        """Plan and rewrite only: what `compile` would do, without generating code."""

        def run_as_is(gm: fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
            if keywords.get("is_inference"):
                self._rewrite_inference(gm)
            return versions.run_as_is(gm, example_inputs)

        with functorch_config.patch(enable_autograd_cache=False):
            if self.options.inner_backend == "eager":
                self.compile(example_inputs)
            else:
                patches = {"custom_partitioner_fn": Partitioner(self.partition, self.key)}
                compile_fx(self.gm, example_inputs, inner_compile=run_as_is, config_patches=patches)
        assert self.compilation is not None
        return self.compilation

    def finish(self, total_s: float) -> Compilation:
        """Place the parameters and return what was decided, from this compilation or from the stored one."""
        if self.compilation is None:
            assert self._stored is not None, "cached code without its plan"
            self.compilation = self._stored
        else:
            seconds = {**self._seconds, "total": total_s}
            self.compilation = dataclasses.replace(self.compilation, compile_s=seconds)
            store_text("compilation", self.key, self.compilation.to_json())
        result = self.compilation
        if result.training or not self.model.is_placed:
            self._place(result.plan, result.owners)
        if result.training:
            self.model.is_placed = True
            self.model.store_footprint(self.names, result.footprint)
        return result

    def _place(self, plan: Plan, owners: Mapping[str, int]) -> None:
        for name, block in owners.items():
            decision = plan.decisions[block]
            place_param(
                self.params[name],
                Placement(
                    params=decision.params, optimizer=decision.optimizer, tier=self.model.session.tier, block=block
                ),
            )

    def _key(self) -> str:
        """Of everything that decides the plan and the code, the same in every process."""
        placed = tuple(self._placement_text(name) for name in sorted(self.params))
        options = self.options
        parts = (
            graph_digest(self.gm, self.inputs, options),
            self.model.session.digest,
            sources_digest(),
            dataclasses.replace(self.machine, host_bytes=0).digest,  # what is free changes by the minute
            self.budget_bytes,
            (
                options.host_budget,
                options.profile,
                sorted(options.allow),
                options.plan.digest if options.plan else None,
            ),
            placed,
            self.model.taken_by_others(self.names),
            [pass_identity(p) for p in versions.custom_passes(inductor_config.post_grad_custom_post_pass)],
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def _placement_text(self, name: str) -> tuple[object, ...]:
        param, placement = self.params[name], placement_of(self.params[name])
        where = ("", "") if placement is None else (placement.params.value, placement.optimizer.value)
        return (name, *where, planning.state_bytes(param) if optimizer_of(param) is not None else -1)

    # -- training graphs ------------------------------------------------------------------------------------------

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Group, profile, plan, partition and rewrite. Signature of AOTAutograd's partitioners."""
        joint = rewriting.run_user_passes(self.options.passes.joint, joint, None)
        with self._timed("grouping"):
            blocks = group_blocks(joint, parameter_fqns(joint, self.inputs))
        original = rewriting.copy_graph(joint)
        neutral = rewriting.keep_everything(planning.labels_of(blocks.blocks))
        split = self._split(joint, joint_inputs, blocks, neutral, keywords)
        with self._timed("profiling"):
            profile = self._profile(split, blocks)
        before = (graph_text(split.forward), graph_text(split.backward))
        problem, plan, split, contexts = self._planned(split, original, joint_inputs, blocks, profile, keywords)
        self._forward_context, self._backward_context = contexts
        split.forward = rewriting.run_user_passes(self.options.passes.forward, split.forward, contexts[0])
        split.backward = rewriting.run_user_passes(self.options.passes.backward, split.backward, contexts[1])
        if contexts[0].offloaded:
            # A saved tensor that arrives in host memory must not become the backward code's scratch.
            functorch_config.donated_buffer = False
        self.compilation = self._report(problem, plan, profile, blocks, before, split)
        return split.forward, split.backward

    def _split(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[object],
        blocks: BlockGraph,
        plan: Plan,
        keywords: dict[str, Any],
    ) -> rewriting.Partitioned:
        context = PassContext(stage=Stage.JOINT, plan=plan, block_of=block_index(blocks))
        return rewriting.partition(joint, joint_inputs, context, keywords, self.options.verify)

    def _profile(self, split: rewriting.Partitioned, blocks: BlockGraph) -> Profile:
        partition = Partition(
            forward=split.forward,
            backward=split.backward,
            num_outputs=split.num_outputs,
            blocks=blocks,
            block_of=block_index(blocks),
            params=self._param_infos(split.forward),
            inner_backend=self.options.inner_backend,
        )
        measured = self.options.profile == "measured" and self.budget_bytes is not None and self._stored is None
        if not measured:
            return profile_analytic(partition, self.machine)
        assert self.budget_bytes is not None
        return profile_measured(partition, self.machine, max_bytes=max(self.budget_bytes - self._live_bytes(), 0))

    def _param_infos(self, gm: fx.GraphModule) -> dict[str, ParamInfo]:
        infos = {}
        for placeholder, fqn in parameter_fqns(gm, self.inputs).items():
            param = self.params[fqn]
            infos[placeholder] = ParamInfo(
                fqn=fqn,
                num_bytes=param.numel() * param.element_size(),
                num_elements=param.numel(),
                requires_grad=param.requires_grad,
                state_bytes=planning.state_bytes(param),
            )
        return infos

    def _planned(
        self,
        split: rewriting.Partitioned,
        original: fx.GraphModule,
        joint_inputs: Sequence[object],
        blocks: BlockGraph,
        profile: Profile,
        keywords: dict[str, Any],
    ) -> tuple[Problem, Plan, rewriting.Partitioned, tuple[PassContext, PassContext]]:
        """Plan and rewrite until the traced peak of the rewritten graphs keeps the budget."""
        problem = self._problem(blocks, profile, training=True)
        if self.budget_bytes is None:
            usable = allowed = None
        else:
            usable = self.budget_bytes if self._is_given else int(self.budget_bytes * (1 - _RESERVE))
            allowed = usable
        refused: InfeasiblePlanError | None = None
        peak = 0
        for _ in range(_MAX_CORRECTIONS):
            try:
                plan = self._plan(dataclasses.replace(problem, device_budget_bytes=allowed), blocks)
            except InfeasiblePlanError as error:
                if refused is not None or not error.held_up_by:
                    raise
                # Corrections may have gone below what is possible: see what the plan of least peak really needs.
                refused, allowed = error, error.smallest_budget_bytes
                continue
            with self._timed("rewriting"):
                if rewriting.changes_code(plan) or split is None:
                    split = self._split(rewriting.copy_graph(original), joint_inputs, blocks, plan, keywords)
                contexts = rewriting.rewrite_training(
                    split,
                    plan,
                    self.model.session.digest,
                    self.inputs,
                    planning.owners_of(blocks),
                    self.options.verify,
                )
                peak = self._traced_peak(problem, plan, split)
            if usable is None or allowed is None or peak <= usable:
                return problem, dataclasses.replace(plan, peak_bytes=peak), split, contexts
            if refused is not None or self._is_given:
                break
            allowed = min(allowed, plan.peak_bytes) - (peak - usable) - allowed // 1000
            split = None  # type: ignore[assignment]  # consumed by the rewrite
        assert self.budget_bytes is not None
        held_up_by = refused.held_up_by if refused else f"The plan needs {format_bytes(peak)}"
        raise too_small(self.budget_bytes, int(peak / (1 - _RESERVE)) + 1, held_up_by)

    @property
    def _is_given(self) -> bool:
        return self.options.plan is not None or self._stored is not None

    def _plan(self, problem: Problem, blocks: BlockGraph) -> Plan:
        given = self.options.plan or (self._stored.plan if self._stored else None)
        if given is not None:
            return planning.fitted_plan(given, blocks, problem)
        with self._timed("solving"):
            try:
                return planning.solved_plan(problem, blocks, self.options)
            except InfeasiblePlanError:
                if not problem.fixed_decisions:
                    raise
                # Parameters placed for an earlier graph of the model leave no plan: move them, which is always exact.
                return planning.solved_plan(dataclasses.replace(problem, fixed_decisions=()), blocks, self.options)

    def _problem(self, blocks: BlockGraph, profile: Profile, *, training: bool) -> Problem:
        limits = planning.Limits(
            device_budget_bytes=self.budget_bytes,
            host_budget_bytes=host_budget_bytes(self.device, self.options),
            fixed_bytes=self._input_bytes() + self.model.taken_by_others(self.names),
        )
        return planning.make_problem(
            blocks,
            profile.costs,
            self.machine,
            self.options,
            limits,
            self.params,
            training=training,
            keep_placement=self.model.is_placed,
        )

    def _input_bytes(self) -> int:
        """Inputs and buffers: on the device, whatever is decided."""
        return sum(
            item.tensor.numel() * item.tensor.element_size()
            for item in self.inputs
            if item.tensor is not None and not item.is_parameter and not is_symbolic(item.tensor)
        )

    def _live_bytes(self) -> int:
        """What is on the device while this graph is compiled: inputs, and parameters that are not in homes."""
        return self._input_bytes() + sum(p.nbytes for p in self.params.values() if not is_home(p))

    def _traced_peak(self, problem: Problem, plan: Plan, split: rewriting.Partitioned) -> int:
        trace = trace_step(
            split.forward,
            split.backward,
            split.num_outputs,
            device_type=self.device.type,
            inner_backend=self.options.inner_backend,
        )
        return planning.traced_peak_bytes(problem, plan, trace.peak_bytes)

    def _report(
        self,
        problem: Problem,
        plan: Plan,
        profile: Profile,
        blocks: BlockGraph,
        before: tuple[str, str],
        split: rewriting.Partitioned,
    ) -> Compilation:
        simulated = planning.replay(problem, plan)
        return Compilation(
            plan=plan,
            training=True,
            device_budget_bytes=self.budget_bytes,
            owners=planning.owners_of(blocks),
            footprint=Footprint(
                resident_bytes=planning.resident_bytes(problem, plan),
                held_bytes=planning.held_bytes(problem, plan),
                gradient_bytes=planning.device_gradient_bytes(problem, plan),
            ),
            graphs=(
                GraphText(graph="forward", before=before[0], after=graph_text(split.forward)),
                GraphText(graph="backward", before=before[1], after=graph_text(split.backward)),
            ),
            transfers=(*list_transfers(split.forward, "forward"), *list_transfers(split.backward, "backward")),
            events=_lane_events(simulated),
            notes=planning.notes_on_optimizer(list(self.params.values())),
            profile_source=profile.source,
        )

    # -- inference graphs -----------------------------------------------------------------------------------------

    def _rewrite_inference(self, gm: fx.GraphModule) -> PassContext:
        """Fetch host parameters in a graph compiled under ``no_grad``; plan where they live if nothing has yet."""
        blocks = group_blocks(gm, parameter_fqns(gm, self.inputs))
        partition = Partition(
            forward=gm,
            backward=None,
            num_outputs=len(output_args(gm)),
            blocks=blocks,
            block_of=block_index(blocks),
            params={n: dataclasses.replace(i, state_bytes=0) for n, i in self._param_infos(gm).items()},
            inner_backend=self.options.inner_backend,
        )
        profile = profile_analytic(partition, self.machine)
        problem = self._problem(blocks, profile, training=False)
        if self.model.is_placed:
            decisions = tuple(d or BlockDecision() for d in problem.fixed_decisions) or (BlockDecision(),) * len(
                blocks.blocks
            )
            plan = planning.fitted_plan(Plan(labels=problem.labels, decisions=decisions), blocks, problem)
        else:
            plan = planning.solved_plan(dataclasses.replace(problem, fixed_decisions=()), blocks, self.options)
        owners = planning.owners_of(blocks)
        context = PassContext(
            stage=Stage.INFERENCE,
            plan=plan,
            session=self.model.session.digest,
            block_of=block_index(blocks),
            owners=rewriting.owners_by_placeholder(gm, self.inputs, owners),
            num_outputs=len(output_args(gm)),
        )
        before = graph_text(gm)
        passes.run(PIPELINE, gm, context, verify_graph=self.options.verify)
        self.compilation = Compilation(
            plan=plan,
            training=False,
            device_budget_bytes=self.budget_bytes,
            owners=owners,
            graphs=(GraphText(graph="inference", before=before, after=graph_text(gm)),),
            transfers=list_transfers(gm, "inference"),
            events=_lane_events(planning.replay(problem, plan)),
            profile_source=profile.source,
        )
        return context

    # -- what Inductor calls back ---------------------------------------------------------------------------------

    def compile_inner(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        """Inductor's inner compiler, told which graph it is so that `pin` knows."""
        if keywords.get("is_inference"):
            context = self._rewrite_inference(gm)
        else:
            context = self._backward_context if keywords.get("is_backward") else self._forward_context
        self._final_context = context
        try:
            return compile_fx_inner(gm, example_inputs, **keywords)
        finally:
            self._final_context = None

    def pin(self, graph: fx.Graph) -> None:
        """The user's last passes, then ours, on Inductor's final graph."""
        gm = graph.owning_module
        assert gm is not None
        if self._final_context is None:
            return  # a subgraph compiled on its own, such as a pattern's
        rewriting.run_user_passes(self.options.passes.final, gm, self._final_context)
        passes.run(
            PIPELINE,
            gm,
            self._final_context,
            stage=Stage.FINAL,
            given=("blocks", "sorted"),
            verify_graph=self.options.verify,
        )

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - begin


def _lane_events(simulated: Simulation) -> tuple[LaneEvent, ...]:
    return tuple(
        LaneEvent(lane=e.lane, label=e.label, block=e.block, start_s=e.start_s, end_s=e.end_s) for e in simulated.events
    )
