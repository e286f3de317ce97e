"""A model without a chain of layers: what goes down comes up again, beside what goes on."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint

WIDTH = 8


class Block(nn.Module):
    """Also has a buffer, a constant of its code, and an operator that works in place."""

    def __init__(self, inner: int, outer: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(inner, outer), nn.LayerNorm(outer), nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x += torch.tensor(0.25)
        return self.norm(self.dropout(torch.relu(x))) * self.scale


class UNet(nn.Module):
    """Its middle is one weight, which the head reads again; ``unread`` takes no part. A mask is made of the batch.

    ``routes``: integers go from its first layer to its head.
    """

    def __init__(self, dropout: float = 0.0, routes: bool = True) -> None:
        super().__init__()
        self.routes = routes
        self.first, self.down = Block(WIDTH, 16, dropout), Block(16, 12, dropout)
        self.middle = nn.Linear(12, 12, bias=False)
        self.up, self.last = Block(24, 16, dropout), Block(32, 12, dropout)
        self.head = nn.Linear(12, 12, bias=False)
        self.out = nn.Linear(12, WIDTH)
        self.head.weight = self.middle.weight
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, kept: Tensor) -> dict[str, Any]:
        mask = (kept > 0).to(x.dtype) + torch.arange(1, device=x.device)
        first = self.first(x)
        route = first.argmax(-1, keepdim=True)
        down = self.down(first)
        middle = self.middle(down) * mask
        up = self.up(torch.cat([middle, down], -1))
        last = self.last(torch.cat([up, first], -1))
        if self.routes:
            last = last + last.gather(-1, route % last.shape[-1])
        return {"out": self.out(self.head(last)) * mask, "width": WIDTH}


def split_spec() -> dict[str, SplitPoint]:
    """Marks that divide it into five."""
    return {name: SplitPoint.BEGINNING for name in ("down", "middle", "up")} | {"last": SplitPoint.END}
