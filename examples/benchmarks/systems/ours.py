"""autohete_fx: ``model.compile(backend="autohete")`` and ``autohete_fx.AdamW``, within the cap.

Parameters are bf16 and the optimizer holds fp32 masters. The model is built on the CPU and placed, so that it may be larger
than the device. What to recompute is for the planner. Levels are schedules of the updates instead, those that one compiled code
serves: the plan is made for the first of them. The process leaves a trace of that one's lanes in the case's folder, and its plan,
and beside it the plan of AutoHete's three integers for the same problem, for the ablation to replay.
"""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from torch import Tensor, bfloat16

import autohete_fx
from autohete_fx.backend import autohete
from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Activations, Lane, Optimizer, Overlap, Params, Plan, Problem, Schedule
from autohete_fx.planner import given
from autohete_fx.planner.baselines import BASELINES, fits
from autohete_fx.planner.solve import solve
from autohete_fx.runtime.placement import placement_of
from systems.base import LEARNING_RATE, SCHEDULES, WEIGHT_DECAY, CannotRun, Case, Shares, System, file_of, new_model

BUDGET_SHARE = 0.95
"""Of the cap: the rest is for what the allocator loses to fragments."""
HOST_SHARE = "85%"
"""Of host memory: the rest is for the system and compilers, and for what the suite does not let a process take."""


class Ours(System):
    """With updates that overlap the next forward, in either order, or are done inside ``step()``."""

    levels = ("next forward, by priority", "next forward, as gradients came", "inside step()")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.level = case.levels[0] if case.plan else self.levels[0]
        overlap, priority = SCHEDULES[self.level]
        self._solved: Plan | None = None
        self.model = autohete_fx.place(new_model(case, "cpu", bfloat16), case.device)
        self.optimizer = _adamw(self.model, overlap)
        self._problems: list[Problem] = []
        options: dict[str, Any] = {
            "micro_batches": case.micro_batches,
            "inner_backend": "inductor" if case.inductor else "eager",
            "host_budget": HOST_SHARE,
        }
        if case.cap_bytes is not None:
            options["memory_budget"] = int(BUDGET_SHARE * case.cap_bytes)
        if case.plan:
            schedule = Schedule(overlap=Overlap(overlap or "none"), priority=priority)
            options["plan"] = dataclasses.replace(Plan.load(case.plan), schedule=schedule)
        # Not by its name, under which PyTorch finds an installed package only: PYTHONPATH may be all that there is.
        self.model.compile(backend=autohete, options=options)

    def set_level(self, level: str) -> None:
        if level != self.level:
            self._reschedule(*SCHEDULES[level])
        self.level = level

    def _reschedule(self, overlap: str | None, priority: bool) -> None:
        """Code that was compiled for updates over the next forward also serves those inside ``step()``, and any order."""
        self.optimizer.synchronize()
        self.optimizer.overlap = Overlap(overlap or "none")
        compilation = self._compilation()
        schedule = dataclasses.replace(compilation.plan.schedule, priority=priority)
        # Frozen for everybody else; calls of the compiled model read the schedule there.
        object.__setattr__(compilation, "plan", dataclasses.replace(compilation.plan, schedule=schedule))

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self.optimizer.accumulate()

    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._problems:
            return self.model(tokens, targets)
        with mock.patch.object(given, "solve", self._solve):  # only to see the problem
            return self.model(tokens, targets)

    def _solve(self, problem: Problem, **how: Any) -> Plan:
        self._problems.append(problem)
        self.when_profiled()
        return solve(problem, **how)

    def _compilation(self) -> autohete_fx.Compilation:
        return next(c for c in reversed(autohete_fx.compilations()) if c.training)

    def shares(self) -> Shares:
        compilation = self._compilation()
        plan = compilation.plan
        total = sum(p.numel() for p in self.model.parameters())
        placed = [
            (param.numel(), placement, plan.decisions[compilation.owners[name]])
            for name, param in self.model.named_parameters()
            if name in compilation.owners and (placement := placement_of(param)) is not None
        ]
        on_host = sum(n for n, placement, _ in placed if placement.params is Params.HOST)
        recomputed = sum(n for n, _, decision in placed if decision.activations is Activations.RECOMPUTE)
        return Shares(
            optimizer=sum(n for n, placement, _ in placed if placement.optimizer.updates_on_host) / total,
            streamed=sum(n for n, placement, _ in placed if placement.optimizer is Optimizer.STREAMED) / total,
            params=on_host / total,
            fetched_once=sum(n for n, _, d in placed if d.params is Params.HOST and d.keeps_fetched) / max(1, on_host),
            activation_bytes=sum(
                t.num_bytes for t in compilation.transfers if t.graph == "forward" and t.lane is Lane.D2H
            ),
            recompute=recomputed / total,
        )

    def figures(self) -> dict[str, Any]:
        compilation = self._compilation()
        plan = compilation.plan
        if self._solved is None:  # the first level
            self._solved = plan
            self._leave(compilation)
        predicted = {"predicted step s": plan.step_s, "predicted peak bytes": plan.peak_bytes}
        tiers = {where.tier for p in self.model.parameters() if (where := placement_of(p)) is not None}
        return {
            "pinning s": sum(tier.mapped_s for tier in tiers),
            "waiting for homes s": sum(tier.waited_s for tier in tiers),
            **(predicted if plan is self._solved else {}),
            "plan gap": plan.gap,
            "plan": compilation.plan_table(),
            "lanes": compilation.trace().lanes_table(),
            "compile s": dict(compilation.compile_s),
        }

    def _leave(self, compilation: autohete_fx.Compilation) -> None:
        if self.case.folder and not self.case.plan:
            compilation.trace().save(file_of(self.case, "clipping_trace" if self.case.clip else "trace"))
            compilation.plan.save(file_of(self.case, "planned"))

    def finish(self) -> None:
        if self.case.folder and not self.case.plan and self._problems:
            problem = self._problems[-1]
            simple = BASELINES["three-integers"](problem)
            if fits(problem, simple):
                simple.save(file_of(self.case, "three-integers"))


class OursFromBackward(Ours):
    """With updates that start in backward, which clipping does not allow."""

    levels = ("from backward on, by priority",)

    @classmethod
    def reason_against(cls, case: Case) -> str:
        return "updates that start in backward cannot know the norm that clipping needs" if case.clip else ""


def _adamw(model: Any, overlap: str | None) -> autohete_fx.AdamW:
    try:
        return autohete_fx.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, overlap=overlap)
    except OptimizerStateError as error:
        raise CannotRun(str(error)) from error
