"""A model whose graph breaks, and what it trains to, plainly and within a budget."""

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx.runtime.meter import device_live_bytes
from tests import training as job

WIDTH, ROWS, STEPS = 128, 1024, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Broken(nn.Module):
    """So many blocks; the graph breaks behind as many of them as are named, and before the loss if that is asked for."""

    def __init__(self, breaks: tuple[int, ...], breaks_before_loss: bool = False, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.ends = (*breaks, num_blocks)
        self.breaks_before_loss = breaks_before_loss

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.ends[0]]:
            x = block(x)
        if len(self.ends) > 1:
            torch._dynamo.graph_break()  # not within a loop: Dynamo would run the whole frame in eager mode
            for block in self.blocks[self.ends[0] : self.ends[1]]:
                x = block(x)
        if len(self.ends) > 2:
            torch._dynamo.graph_break()
            for block in self.blocks[self.ends[1] : self.ends[2]]:
                x = block(x)
        if self.breaks_before_loss:
            torch._dynamo.graph_break()
        return x.square().mean()


def make(*args: Any, **how: Any) -> Broken:
    torch.manual_seed(0)
    return Broken(*args, **how)


def trained(model: nn.Module, optimizer: Any, rows: int = ROWS, steps: int = STEPS) -> tuple[list[Tensor], list[int]]:
    """Losses, gradients, parameters and states; peaks of every step beside what other tests hold."""
    gc.collect()
    foreign = device_live_bytes("cpu") - sum(p.nbytes for p in model.parameters())
    seen, peaks = [], []
    for step in range(steps):
        x = job.copied(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)))
        torch.manual_seed(step)
        with autohete_fx.MemoryMeter("cpu") as meter:
            loss = model(x)
            loss.backward()
        peaks.append(meter.peak_bytes - foreign)
        seen += [job.copied(loss), *(job.copied(p.grad) for p in model.parameters() if p.grad is not None)]
        with autohete_fx.MemoryMeter("cpu") as meter:
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(meter.peak_bytes - foreign)
    states = optimizer.state_dict()["state"]
    seen += map(job.copied, model.parameters())
    seen += [job.copied(state[name]) for state in states.values() for name in ("exp_avg", "exp_avg_sq")]
    return seen, peaks


def plainly(model: nn.Module, inner: str, **how: Any) -> tuple[list[Tensor], int]:
    if inner == "inductor":
        model.compile(backend="inductor")
    seen, peaks = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), **how)
    torch._dynamo.reset()
    return seen, max(peaks)


def budgeted(
    model: nn.Module, inner: str, budget: int, options: Mapping[str, object] | None = None, **how: Any
) -> tuple[list[Tensor], list[int]]:
    own = {"memory_budget": budget, "inner_backend": inner, "profile": "analytic", "solver_time_limit_s": 1}
    model.compile(backend="autohete", options={**own, **(options or {})})
    return trained(model, autohete_fx.AdamW(model.parameters(), lr=1e-3), **how)
