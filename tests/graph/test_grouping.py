"""Blocks from module paths: which modules are layers, where every node goes, what equal layers share."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autohete_fx.capture.assign import check_order
from autohete_fx.capture.dataflow import split_joint
from autohete_fx.capture.grouping import block_index
from autohete_fx.ir import BlockKind
from tests.joint_graphs import Captured, assert_sound, capture_one, layers

BATCH, TOKENS, WIDTH, VOCAB = 2, 6, 16, 32
ACTIVATION_BYTES = BATCH * TOKENS * WIDTH * 4


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        x = x + self.dropout(self.proj(scores.softmax(-1) @ v))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Embedding, layers in a ModuleList, head."""

    def __init__(self, depth: int = 3, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.recompute else layer(x, mask)
        return self.head(self.norm(x))


class Wrapped(nn.Module):
    """A model inside another module, as a trainer or a loss wrapper holds it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids).square().mean()


def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, TOKENS))


def loss_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def names(captured: Captured) -> list[str]:
    return [block.module_fqn for block in layers(assert_sound(captured))]


def test_kinds_in_execution_order():
    graph = assert_sound(capture_one(GPT(), ids()))
    assert [block.kind for block in graph.blocks] == [BlockKind.PROLOGUE, *[BlockKind.LAYER] * 3, BlockKind.EPILOGUE]
    assert [block.label for block in graph.blocks] == ["prologue", "layers.0", "layers.1", "layers.2", "epilogue"]


@pytest.mark.parametrize(
    ("prefix", "make"),
    [
        ("", lambda: capture_one(GPT(), ids())),
        ("", lambda: capture_one(GPT(), ids(), in_place=True)),
        ("", lambda: capture_one(loss_of(GPT()), ids())),
        ("inner.", lambda: capture_one(Wrapped(GPT()), ids())),
        ("inner.", lambda: capture_one(Wrapped(GPT()), ids(), in_place=True)),
        ("inner.inner.", lambda: capture_one(Wrapped(Wrapped(GPT())), ids())),
        ("", lambda: capture_one(GPT(recompute=True), ids())),
    ],
    ids=["module", "in place", "function", "wrapped", "wrapped in place", "wrapped twice", "checkpointed"],
)
def test_names_are_the_users_own(prefix: str, make: Callable[[], Captured]):
    assert names(make()) == [f"{prefix}layers.{index}" for index in range(3)]
