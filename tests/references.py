"""Our optimizers, and for each the reference whose arithmetic it must equal."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import autohete_fx


def copied(t: Tensor) -> Tensor:
    """The values now, in memory that is no device's: NumPy's, which no meter counts."""
    values = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return torch.from_numpy(values).view(t.dtype).view(t.shape)


class ReferenceAdamW:
    """``torch.optim.AdamW(fused=True)``; the parameters named in ``on_host`` are stepped as copies on the CPU."""

    def __init__(self, model: nn.Module, on_host: frozenset[str]) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.pairs = [(p, copied(p).requires_grad_() if name in on_host else p) for name, p in trained]
        self.optimizer = torch.optim.AdamW([stepped for _, stepped in self.pairs], lr=1e-3, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for p, stepped in self.pairs:
            if stepped is not p and p.grad is not None:
                stepped.grad = copied(p.grad)
        self.optimizer.step()
        for p, stepped in self.pairs:
            if stepped is not p:
                p.copy_(stepped)

    def zero_grad(self) -> None:
        for p, stepped in self.pairs:
            p.grad = stepped.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class ReferenceLion:
    """Lion as its paper has it (arXiv 2302.06675), one operation after another, on fp32 or fp64 parameters."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.1):
        self.params, self.lr, self.betas, self.weight_decay = list(params), lr, betas, weight_decay
        self.momenta = [torch.zeros_like(p) for p in self.params]
        self.sign = 1.0  # -1.0 to ascend

    @torch.no_grad()
    def step(self) -> None:
        beta1, beta2 = self.betas
        for p, m in zip(self.params, self.momenta, strict=True):
            if p.grad is not None:
                g = self.sign * p.grad
                update = torch.sign(beta1 * m + (1 - beta1) * g)
                p.copy_(p * (1 - self.lr * self.weight_decay) - self.lr * update)
                m.copy_(beta2 * m + (1 - beta2) * g)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": {n: {"exp_avg": m} for n, m in enumerate(self.momenta)}}


def adamw(model: nn.Module, overlap: str | None = "step") -> autohete_fx.AdamW:
    """Ours, with the hyperparameters of its reference."""
    return autohete_fx.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, overlap=overlap)


def lion(model: nn.Module, overlap: str | None = "step") -> autohete_fx.Lion:
    """Ours, with the hyperparameters of its reference."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return autohete_fx.Lion(trained, lr=1e-3, weight_decay=0.1, overlap=overlap)


def adam(model: nn.Module, overlap: str | None = "step") -> autohete_fx.Adam:
    """Ours, with the hyperparameters of its reference."""
    return autohete_fx.Adam(model.parameters(), lr=1e-3, weight_decay=0.1, overlap=overlap)


def momentum(model: nn.Module, overlap: str | None = "step") -> autohete_fx.SGD:
    """Ours, with the hyperparameters of its reference."""
    how = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
    return autohete_fx.SGD(model.parameters(), **how, overlap=overlap)


def sgd(model: nn.Module, overlap: str | None = "step") -> autohete_fx.SGD:
    """Ours, with the hyperparameters of its reference, and no state."""
    return autohete_fx.SGD(model.parameters(), lr=1e-1, overlap=overlap)


def muon(model: nn.Module, overlap: str | None = "step") -> autohete_fx.Muon:
    """Ours, with the hyperparameters of its reference."""
    return autohete_fx.Muon(model, lr=0.02, adamw={"lr": 1e-3}, overlap=overlap)


class ReferenceMuon:
    """``torch.optim.Muon`` for the matrices of layers, ``torch.optim.AdamW`` for all else."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        matrices = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2]
        inside = set(map(id, matrices))
        others = [p for p in self.params if id(p) not in inside]
        self.optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3, fused=True)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """States in the order of ours: matrices first."""
        states = [optimizer.state[p] for optimizer in self.optimizers for p in optimizer.param_groups[0]["params"]]
        return {"state": dict(enumerate(states))}


REFERENCES: dict[Any, Callable[[nn.Module], Any]] = {
    lion: lambda model: ReferenceLion(model.parameters()),
    adam: lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True),
    momentum: lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True
    ),
    sgd: lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, fused=True),
    muon: ReferenceMuon,
}
"""What each of them must equal, by what makes ours."""
