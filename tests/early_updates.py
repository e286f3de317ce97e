"""A small model whose updates start in backward, beside a twin that has no updates under way."""

from collections.abc import Callable
from typing import Any

import torch

import autohete_fx
from autohete_fx import BlockDecision, Plan
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime.pending.updates import Updates
from tests.held_updates import OPTIMIZER_ON_HOST, Gate, Stack, labels, updates_of

X = torch.ones(8, 128)


def overlapping(decisions: tuple[BlockDecision, ...], names: tuple[str, ...], **schedule: Any) -> Plan:
    return Plan(labels=names, decisions=decisions, schedule=Schedule(overlap=Overlap.BACKWARD, **schedule))


class Loop:
    """A stack that has taken two steps, and a twin that takes the same without overlap."""

    def __init__(
        self, gate: Gate, decision: BlockDecision = OPTIMIZER_ON_HOST, options: dict[str, Any] | None = None, **how: Any
    ) -> None:
        self.gate = gate
        self.model, self.twin = Stack(), Stack()
        self.optimizer = autohete_fx.AdamW(self.model.parameters(), lr=1e-2, overlap="backward", **how)
        self.reference = torch.optim.AdamW(self.twin.parameters(), lr=1e-2, fused=True)
        names = labels()
        given = {
            "inner_backend": "eager",
            "profile": "analytic",
            "plan": overlapping((decision,) * len(names), names),
            **(options or {}),
        }
        self.model.compile(backend="autohete", options=given)
        for _ in range(2):
            self.step()
        self.optimizer.synchronize()

    def pairs(self) -> list[tuple[Stack, torch.optim.Optimizer]]:
        return [(self.twin, self.reference), (self.model, self.optimizer)]

    def step(self) -> None:
        for model, optimizer in self.pairs():
            model(X).backward()
            optimizer.step()
            optimizer.zero_grad()

    @property
    def updates(self) -> Updates:
        return updates_of(self.model)

    def both(self, act: Callable[[Stack, torch.optim.Optimizer], Any]) -> None:
        """The same with the model and its twin, and then another step of both; parameters and states agree."""
        found, expected = (act(model, optimizer) for model, optimizer in reversed(self.pairs()))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        self.step()
        torch.testing.assert_close(self.model.state_dict(), self.twin.state_dict(), rtol=0, atol=0)
        states = [optimizer.state_dict()["state"] for _, optimizer in self.pairs()]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
