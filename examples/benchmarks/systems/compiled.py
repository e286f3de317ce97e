"""Plain ``torch.compile``, everything on the device: with ``torch.utils.checkpoint``, and with PyTorch's own memory budget.

PyTorch has no AdamW with fp32 masters for bf16 parameters. So that numerics are those of the others and the memory is the
least, ``compile`` and ``memory-budget`` use ``autohete_fx.AdamW`` as a plain optimizer: without our backend its states stay
on the device and its step is the fused one. ``compile-autocast`` has what PyTorch offers: fp32 parameters under bf16
autocast and ``torch.optim.AdamW(fused=True)``; its residual stream and norms are fp32.
"""

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import autohete_fx
from systems.base import LEARNING_RATE, WEIGHT_DECAY, Case, Shares, System, new_model, recompute_by_level


class Compiled(System):
    """bf16 parameters, fp32 masters."""

    is_offloading = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = new_model(case, case.device, self.dtype())
        self.optimizer = self.new_optimizer()
        recompute_by_level(self.model, self.level)
        self.model.compile(backend=case.backend, dynamic=False)

    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return torch.bfloat16

    def new_optimizer(self) -> torch.optim.Optimizer:
        """For the model's parameters."""
        return autohete_fx.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, overlap=None)

    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets)

    def shares(self) -> Shares:
        return Shares(recompute=self.recompute_share())


class CompiledUnderAutocast(Compiled):
    """fp32 parameters, bf16 products."""

    def dtype(self) -> torch.dtype:
        return torch.float32

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.case.device.type, torch.bfloat16):
            return self.model(tokens, targets)


class MemoryBudget(Compiled):
    """PyTorch decides what to recompute, from ``activation_memory_budget``; its levels are settings of it."""

    levels = ("0.2", "0.5", "0.8")

    def set_level(self, level: str) -> None:
        self.level = level
        torch.compiler.reset()
        functorch_config.activation_memory_budget = float(level)

    def recompute_share(self) -> float:
        """Not told by PyTorch; none is the lower bound of the work."""
        return 0.0
