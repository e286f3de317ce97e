"""A model in training, as the benchmarks that compare step times run it."""

import gc
import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autohete_fx

Loss = Callable[[Tensor], Tensor]

_WARM_UP = 3
_numbers = itertools.count()


class Trained:
    """A model in training.

    Attributes:
        peak_bytes: peak device memory of two steps, without what was allocated before the model was made.

    Args:
        make: gives the model, its optimizer and what computes its loss for a batch of tokens.
        tokens: the batch.
        how: arguments of ``torch.compile``.
    """

    def __init__(self, make: Callable[[], tuple[nn.Module, Any, Loss]], tokens: Tensor, **how: Any) -> None:
        gc.collect()  # what is garbage must not count as others' memory now, and be gone at the peak
        with autohete_fx.MemoryMeter("cpu") as meter:
            others = meter.start_bytes
        torch.manual_seed(0)
        self.model, self.optimizer, loss_of = make()
        self.loss_of = torch.compile(_distinct(loss_of), **how)
        self.tokens = tokens
        for _ in range(_WARM_UP):
            self.step()
        with autohete_fx.MemoryMeter("cpu") as meter:
            self.step()
            self.step()
        self.peak_bytes = meter.peak_bytes - others

    def step(self) -> float:
        """One training step; returns its seconds."""
        begin = time.perf_counter()
        self.loss_of(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def _distinct(loss_of: Loss) -> Loss:
    """The same function with code of its own: Dynamo keeps what it compiled with the code, and would run for one model
    what it compiled for another, whatever PyTorch's configuration was each time."""
    assert isinstance(loss_of, types.FunctionType)
    code = loss_of.__code__
    code = code.replace(co_name=f"{code.co_name}_{next(_numbers)}")
    return types.FunctionType(code, loss_of.__globals__, code.co_name, loss_of.__defaults__, loss_of.__closure__)
