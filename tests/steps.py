"""A story of training and evaluation, told without us and with us: the same values, and the most memory that each part took."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch

import autohete_fx
from autohete_fx.runtime.meter import device_live_bytes
from tests import training as job

SIZES = job.Sizes(width=128, heads=4, layers=4, batch=2, time=128)
OPTIONS: dict[str, Any] = {"inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1}


class Steps:
    """A model that trains and evaluates, with us or without, what it computes, and the most bytes that it has beyond those of other
    tests."""

    def __init__(self, model: job.Model, is_ours: bool) -> None:
        self.model, self.is_ours = model, is_ours
        self.optimizer: Any = job.adamw(model) if is_ours else job.ReferenceAdamW(model, frozenset())
        self.foreign = device_live_bytes("cpu") - sum(p.nbytes for p in model.parameters())
        self.seen, self.peaks = list[torch.Tensor](), list[int]()

    def compile(self, *, dynamic: bool | None = None, **options: Any) -> None:
        if self.is_ours:
            self.model.compile(backend="autohete", dynamic=dynamic, options={**OPTIONS, **options})

    def train(self, *steps: int, micro_batches: int = 1, batch: int = SIZES.batch) -> None:
        for step in steps:
            for micro_batch in range(micro_batches):
                torch.manual_seed(1000 * step + micro_batch)
                with autohete_fx.MemoryMeter("cpu") as meter:
                    loss = self.model(job.batch("cpu", step, micro_batch, dataclasses.replace(SIZES, batch=batch)))
                    loss.backward()
                self._note(meter, loss)
            self.seen += [job.copied(p.grad) for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seen += map(job.copied, self.model.parameters())

    def evaluate(self, batch: int = SIZES.batch) -> None:
        self.model.eval()
        with torch.no_grad(), autohete_fx.MemoryMeter("cpu") as meter:
            loss = self.model(job.batch("cpu", 99, 0, dataclasses.replace(SIZES, batch=batch)))
        self.model.train()
        self._note(meter, loss)

    def _note(self, meter: autohete_fx.MemoryMeter, loss: torch.Tensor) -> None:
        self.peaks.append(meter.peak_bytes - self.foreign)
        self.seen.append(job.copied(loss))


def equal_to_plain(story: Callable[[Steps], None], kind: type[job.Model] = job.Model) -> Steps:
    """A story told without us and with us, whose values are the same."""

    def told(is_ours: bool) -> Steps:
        torch.manual_seed(0)
        steps = Steps(kind(SIZES), is_ours)
        story(steps)
        return steps

    expected = told(False).seen
    gc.collect()
    ours = told(True)
    job.assert_equal(ours.seen, expected, bitwise=True)
    return ours
