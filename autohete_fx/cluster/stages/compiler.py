"""The compiler of a job's stages: the backend of `torch.compile` that the job was given, or none."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autohete_fx.cluster.deploy import Deployment, Seat, kept_wholes, states_on_device
from autohete_fx.cluster.memory import in_flight
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.stages.module import StageModule
from autohete_fx.optim.base import PlannedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCompiler:
    """How a job's stages are compiled.

    Attributes:
        backend: of `torch.compile`; None: stages run as they are.
        options: of that backend.
        memory_budget: of each GPU, for stages that our backend compiles.
    """

    backend: str | Callable[..., Any] | None
    options: dict[str, Any] | None
    memory_budget: str | int | None

    def __str__(self) -> str:
        return f"{getattr(self.backend, '__qualname__', self.backend)} {self.options}"

    @property
    def is_autohete(self) -> bool:
        """The backend is ours. It frees the parameters that shards have gathered, and moves states to hosts."""
        return getattr(self.backend, "__name__", self.backend) == "autohete"

    def compiled(self, stage: StageModule, more: dict[str, Any] | None = None) -> Any:
        """A stage as the job runs it. ``more``: options that hold where the user has given no other."""
        if self.backend is None:
            return stage
        options = {**more, **(self.options or {})} if more else self.options
        return torch.compile(stage, backend=self.backend, options=options)

    def compiled_in(self, deployment: Deployment, seat: Seat, stage: StageModule) -> Any:
        """The stage of a seat as the job runs it. Our backend is told which passes it runs, and in how much memory."""
        if not self.is_autohete:
            return self.compiled(stage)
        pipeline = deployment.plan.pipelines[seat.pipeline]
        held = in_flight(seat.place, len(pipeline.stages), pipeline.micro_batches, deployment.plan.schedule)
        told = {"micro_batches": pipeline.micro_batches, "in_flight": held, "memory_budget": self.memory_budget}
        return self.compiled(stage, told)

    def more_memory(self, plan: ClusterPlan, optimizer: object) -> list[str]:
        """Why stages will take more memory than a plan says, in sentences: only our backend and optimizers keep to it."""
        reasons: list[str | None] = []
        if not (self.is_autohete and isinstance(optimizer, PlannedOptimizer | None)):
            reasons.append(states_on_device(plan, optimizer))
        if not self.is_autohete:
            reasons.append(kept_wholes(plan, str(getattr(self.backend, "__name__", self.backend))))
        return [reason for reason in reasons if reason is not None]
