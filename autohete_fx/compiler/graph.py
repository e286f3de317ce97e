"""Compile one graph: the partitioner, inner compiler and last graph pass that Inductor and AOTAutograd call back.

The order of calls on a cache miss is: `partition` (joint graph; plans and rewrites), `compile_inner` for forward and
for backward, `pin` inside each. An inference graph has no joint graph: `compile_inner` does everything. On a cache hit
none of them runs and `finish` reads the stored `Compilation`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import fx

from autohete_fx import passes
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.fitting import Budget, Planned, Rewritten
from autohete_fx.compiler.inference import InferencePlanner
from autohete_fx.compiler.parameters import place_parameters
from autohete_fx.compiler.shares import Unsettled
from autohete_fx.compiler.stored import StoredPlan
from autohete_fx.compiler.training import TrainingPlanner
from autohete_fx.errors import AutoHeteError, InfeasiblePlanError, PassError, PlanError
from autohete_fx.internals import dynamo, versions
from autohete_fx.internals.configs import functorch_config, inductor_config
from autohete_fx.internals.inductor import (
    InductorError,
    LastPass,
    Partitioner,
    compile_fx,
    compile_fx_inner,
    refuse_other_partitioner,
    run_without_code,
)
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.passes import PIPELINE, PassContext, Stage
from autohete_fx.planner import given
from autohete_fx.planner.infeasible import advice_of, broken_up
from autohete_fx.planner.model.footprint import resident_bytes, traced_peak_bytes
from autohete_fx.profiler import CompiledCode, dry_run
from autohete_fx.profiler.memory.probe import Probe, probing
from autohete_fx.report.stages import Stages
from autohete_fx.runtime import (
    cpu_counter,
    kernels,  # noqa: F401  (registers the ops' kernels)
)
from autohete_fx.runtime.meter import peak_of
from autohete_fx.runtime.shard.same_call import SameCall

log = logging.getLogger(__name__)

_Compiled = TypeVar("_Compiled")

_MAX_COMPILATIONS = 4
_UNJUDGED = (
    "the compiled code could not be run without memory, as where sizes are symbolic, numbers come out of tensors or wrappers are"
    " C++: the predicted peak is that of the trace alone; compile with dynamic=False, or leave some of the budget free"
)


class GraphCompiler:
    """State of one call of the backend.

    Attributes:
        same_call: what is around calls of the graph where other ranks run it, too.
    """

    def __init__(self, captured: CapturedGraph) -> None:
        if captured.options.inner_backend == "inductor":
            refuse_other_partitioner()
        self.captured = captured
        self.compilation: Compilation | None = None
        self._planned: Rewritten | None = None
        self._seconds: dict[str, float] = {}
        self._compiled: dict[Stage, CompiledCode] = {}
        self._final: tuple[PassContext, fx.GraphModule] | None = None
        self._stages = Stages()
        self.same_call: SameCall | None = None

    # -- entry and exit -------------------------------------------------------------------------------------------

    def compile(self, example_inputs: Sequence[Any]) -> Any:
        """The compiled graph. Sets ``compilation`` unless the code came from a cache.

        The plan keeps the budget as far as a trace can tell; what was compiled is the judge. Where it needs more, the
        difference is withheld from the next plan.
        """
        if self._keeps_freed:
            cpu_counter.keep_freed()
        with self._agreeing(), self._probing(), self._telling():
            return self._fitting(lambda: self._compile(example_inputs))

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Around what all ranks do alike that hold the parameters."""
        agreement = self.captured.agreement
        self.captured.agree()
        self._stored = StoredPlan(self.captured.key(), agreement)
        yield
        if agreement.is_shared:
            made = self.compilation or self._stored.compilation
            text = "" if made is None else agreement.described(made)
            # A pass without an identity has one in each process, and so have symbols of sizes their names.
            text = re.sub(r"\bs\d+\b", "", text.replace(self.captured.model.session.digest, ""))
            agreement.same("rewritten graphs", {"digest": hashlib.sha256(text.encode()).hexdigest()[:12]})
            self.same_call = agreement.same_call(text, training=made is not None and made.training)

    @property
    def _keeps_freed(self) -> bool:
        """Where the device is a CPU, its allocator has to keep the budget too: glibc's holds more than tensors do."""
        return self.captured.budget_bytes is not None and self.captured.device.type == "cpu" and sys.platform == "linux"

    def _probing(self) -> contextlib.AbstractContextManager[None]:
        """Where a budget has to be kept, what kernels take beside their results is measured on the device."""
        device, budget = self.captured.device, self.captured.budget_bytes
        counted = functools.partial(peak_of, device)
        return probing(None if budget is None else Probe(device.type, counted, self.captured.free_bytes()))

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """The stages of what happens within, a line each. Where the code is found in a cache, tracing was all."""
        with self._stages:
            self._stages.begin("tracing", began_s=dynamo.conversion_began_s())
            yield
            if self.compilation is None:
                self._stages.end("the code and its plan were in the cache")

    def _compile(self, example_inputs: Sequence[Any]) -> Any:
        if self.captured.options.inner_backend == "eager":
            with self._own_config():
                return versions.aot_eager(
                    self.captured.gm,
                    example_inputs,
                    partition_fn=self.partition,
                    inference_pass=self._rewrite_inference,
                )
        for attempt in range(1, _MAX_COMPILATIONS + 1):
            with self.captured.agreement.settled(self._stored.compilation is not None):
                compiled = self._compile_fx(example_inputs)
            if self.compilation is None and self._stored.compilation is None:
                # The code was cached but its plan is gone (the cache directories are separate): compile afresh.
                fresh = inductor_config.patch(force_disable_caches=True)
                with functorch_config.patch(enable_autograd_cache=False), fresh:
                    compiled = self._compile_fx(example_inputs)
            withheld = self._judge(is_last=attempt == _MAX_COMPILATIONS)
            withheld = self.captured.agreement.most("withheld bytes", withheld)
            if not withheld:
                return compiled
            self._stages.end("takes more than the budget: it is planned again")
            self._stages.begin("tracing")
            # The last attempt withholds all of the budget and so gets the plan of least peak: its code must fit, not its trace.
            all_of_it = attempt == _MAX_COMPILATIONS - 1
            self._stored.withhold(self._budget.device_bytes if self._budget and all_of_it else withheld)
        raise AssertionError("the last attempt keeps the budget or raises")

    def _own_config(self) -> contextlib.AbstractContextManager[None]:
        """The partitioner may turn donated buffers off for this graph alone. The backward is compiled with the forward,
        not when it first runs: a step whose code breaks the budget must not begin."""
        return functorch_config.patch(
            donated_buffer=functorch_config.donated_buffer, force_non_lazy_backward_lowering=True
        )

    def _compile_fx(self, example_inputs: Sequence[Any]) -> Any:
        user_passes = versions.custom_passes(inductor_config.post_grad_custom_post_pass)
        patches = {
            "custom_partitioner_fn": Partitioner(self.partition, self._stored.code_key),
            "post_grad_custom_post_pass": LastPass(self.pin, self._stored.code_key, user_passes),
        }
        with self._own_config():
            return compile_fx(
                self.captured.gm, example_inputs, inner_compile=self.compile_inner, config_patches=patches
            )

    def look(self, example_inputs: Sequence[Any]) -> Compilation:
        """Plan and rewrite only: what `compile` would do, without generating code."""
        if self.captured.options.inner_backend == "eager":
            with functorch_config.patch(enable_autograd_cache=False):
                self.compile(example_inputs)
        else:
            with self._agreeing(), self._own_config(), self._probing(), self._telling():
                partitioner = Partitioner(self.partition, self._stored.key)
                self._fitting(
                    lambda: run_without_code(self.captured.gm, example_inputs, partitioner, self._rewrite_inference)
                )
            self._refuse_unjudged()
        assert self.compilation is not None
        return self.compilation

    def finish(self, total_s: float) -> Compilation:
        """Place the parameters and return what was decided, from this compilation or from the stored one."""
        if self.compilation is None:
            assert self._stored.compilation is not None, "cached code without its plan"
            result = self._stored.compilation
        else:
            seconds = {**self.compilation.compile_s, "total": total_s}
            result = dataclasses.replace(self.compilation, compile_s=seconds)
            self._stored.store(result)
        model = self.captured.model
        self._warn_of_inference(result)
        if result.training or not model.is_placed:
            place_parameters(self.captured.params, result, model)
        if result.training:
            self._share(result)
        if self._keeps_freed:
            cpu_counter.give_back()  # what parameters were in
        # Inductor keeps its configuration with the compiled code, and that refers to this object: the batch that the
        # graph was compiled with must not live as long.
        self._compiled.clear()
        self._planned = self._final = None
        del self.captured, self._stored  # the groups of ranks that agreed are not to live as long, either
        return result

    def _share(self, result: Compilation) -> None:
        """Note what the graph takes beside others, and what they are to take beside it."""
        captured, shares = self.captured, self.captured.model.shares
        for other, share in zip(captured.unsettled, result.shares, strict=False):
            shares.footprints[other], shares.decided[other] = share.footprint, share
        if captured.unsettled:
            shares.unsettled.clear()
        shares.unread, unsettled = tuple(map(weakref.ref, captured.unread)), None
        if result.unsettled is not None:
            resident = resident_bytes(result.unsettled, result.plan)
            unsettled = Unsettled(
                digest=captured.digest,
                problem=result.unsettled,
                decisions=result.plan.decisions,
                footprint=result.footprint,
                small_bytes=result.footprint.resident_bytes - resident,
                modelled_bytes=given.replayed(result.plan, result.unsettled).peak_bytes,
                peak_bytes=result.plan.peak_bytes - captured.others_bytes,
            )
        shares.store(captured.origin, result.footprint, unsettled)

    # -- the budget -----------------------------------------------------------------------------------------------

    @property
    def _budget(self) -> Budget | None:
        budget = self.captured.budget_bytes
        return None if budget is None else Budget(device_bytes=budget, withheld_bytes=self._stored.withheld_bytes)

    def _fitting(self, compile_: Callable[[], _Compiled]) -> _Compiled:
        """Compile, and once more without the stored plan where that does not fit the graph."""
        try:
            return compile_()
        except PlanError:
            if (
                self._stored.compilation is None
                or self.captured.options.plan is not None
                or self.captured.agreement.is_shared
            ):
                raise
        self._stages.end("the plan in the cache is of another graph: it is planned afresh")
        self._stages.begin("tracing")
        self._stored.forget()
        return compile_()

    def _judge(self, *, is_last: bool) -> int:
        """See what the compiled code takes; from then on that is the plan's peak. Returns how much of the budget to withhold from
        the next plan; 0 where this one will do. Raises InfeasiblePlanError where no other plan is to be had."""
        planned, compilation, captured = self._planned, self.compilation, self.captured
        codes = [self._compiled.get(context.stage) for context in planned.contexts] if planned else []
        self._compiled.clear()
        if planned is None or compilation is None or not codes or codes[0] is None or codes[-1] is None:
            return 0
        backward = codes[1] if compilation.training else None
        outputs, device, outside = planned.contexts[0].num_outputs, captured.device.type, captured.outside.peak_bytes
        peak = dry_run(codes[0], backward, outputs, device_type=device, outside_bytes=outside)
        if peak is None:
            self._refuse_unjudged()
            if self._budget is not None and compilation.training:
                self.compilation = dataclasses.replace(compilation, notes=(*compilation.notes, _UNJUDGED))
            return 0
        peak, traced = traced_peak_bytes(planned.problem, compilation.plan, peak), compilation.plan.peak_bytes
        plan = dataclasses.replace(compilation.plan, peak_bytes=peak)
        self.compilation = dataclasses.replace(compilation, plan=plan)
        # An unsettled graph is judged with the last graph of its call; one that found its parameters placed by training only warns.
        is_free = captured.is_unsettled if compilation.training else captured.model.is_placed
        if self._budget is None or peak <= self._budget.device_bytes or is_free:
            return 0
        if is_last or self._is_given(compilation.training) or planned.refusal is not None:
            raise self._over_budget(self._budget, planned, peak)
        return self._budget.withheld_after(peak, traced)

    def _warn_of_inference(self, result: Compilation) -> None:
        """Where evaluation beside training takes more than the budget: it is exact, and fails only if the memory is not there."""
        budget, peak = result.device_budget_bytes, result.plan.peak_bytes
        if not result.training and budget is not None and peak > budget:
            log.warning(
                "a graph without gradients takes %s of device memory, with the optimizer states that training has there;"
                " memory_budget is %s. Evaluate in smaller batches to keep it",
                format_bytes(peak),
                format_bytes(budget),
            )

    def _refuse_unjudged(self) -> None:
        """Without compiled code that can be run on tensors without memory, what the trace says counts."""
        if self._planned is not None and self._planned.refusal is not None:
            raise self._planned.refusal

    def _over_budget(self, budget: Budget, planned: Rewritten, peak_bytes: int) -> InfeasiblePlanError:
        why = planned.refusal.held_up_by if planned.refusal else ""
        refusal = budget.refusal_of_code(peak_bytes, why, advice=advice_of(planned.problem))
        return broken_up(refusal, self.captured.model.shares.graph_breaks)

    def _is_given(self, training: bool) -> bool:
        """Whether the plan is not ours to change."""
        return self._stored.compilation is not None or (training and self.captured.options.plan is not None)

    # -- what Inductor calls back ---------------------------------------------------------------------------------

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Group, profile, plan, partition and rewrite. Signature of AOTAutograd's partitioners."""
        stored = self._stored.compilation
        planner = TrainingPlanner(
            self.captured,
            joint,
            joint_inputs,
            keywords,
            given=self.captured.options.plan or (stored.plan if stored else None),
            shares=stored.shares if stored else (),
            budget=self._budget,
            seconds=self._seconds,
            stages=self._stages,
        )
        self._note(planner.run(may_measure=stored is None))
        assert self._planned is not None
        if self._planned.contexts[0].offloaded:
            # A saved tensor that arrives in host memory must not become the backward code's scratch.
            functorch_config.donated_buffer = False
        if self.captured.options.inner_backend == "eager":  # no compiler will call `pin`
            self._refuse_unjudged()
            for gm, context in zip(self._planned.graphs, self._planned.contexts, strict=True):
                self._run_final(gm, context)
        forward, backward = self._planned.graphs
        return forward, backward

    def _rewrite_inference(self, gm: fx.GraphModule) -> PassContext:
        stored = self._stored.compilation
        given = stored.plan if stored else None
        self._note(InferencePlanner(self.captured, gm, given=given, budget=self._budget, stages=self._stages).run())
        assert self._planned is not None
        (context,) = self._planned.contexts
        if self.captured.options.inner_backend == "eager":
            self._refuse_unjudged()
            self._run_final(gm, context)
        return context

    def _note(self, planned: Planned) -> None:
        self._planned, self.compilation = planned.rewritten, planned.compilation

    def compile_inner(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **keywords: Any) -> Any:
        """Inductor's inner compiler, told which graph it is so that `pin` knows."""
        if keywords.get("is_inference"):
            context = self._rewrite_inference(gm)
        else:
            assert self._planned is not None, "a graph with gradients came past the partitioner"
            context = self._planned.contexts[1 if keywords.get("is_backward") else 0]
        self._final = context, gm
        self._stages.begin("compiling")
        try:
            compiled = compile_fx_inner(gm, example_inputs, **keywords)
        except InductorError as error:
            if isinstance(error.inner_exception, AutoHeteError):  # a pass's, raised in `pin`
                raise error.inner_exception from error.inner_exception.__cause__
            raise
        finally:
            self._final = None
        self._compiled[context.stage] = CompiledCode(graph=compiled, inputs=tuple(example_inputs))
        return compiled

    def pin(self, graph: fx.Graph) -> None:
        """The user's last passes, then ours, on Inductor's final graph."""
        gm = graph.owning_module
        assert gm is not None
        if self._final is None:
            return  # a pattern's, compiled on its own
        context, whole = self._final
        if gm in list(whole.modules())[1:]:
            return  # a branch of `torch.cond`
        options = self.captured.options
        self._run_final(gm, context)
        given = ("blocks", "sorted")
        passes.run(PIPELINE, gm, context, stage=Stage.FINAL, given=given, verify_graph=options.verify)

    def _run_final(self, gm: fx.GraphModule, context: PassContext) -> None:
        if rewriting.run_user_passes(self.captured.options.passes.final, gm, context) is not gm:
            raise PassError(
                "a pass at 'final' returned another GraphModule than it was given, which comes too late to be compiled;"
                " change the given one in place"
            )
