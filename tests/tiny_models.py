"""Small models that train in a moment, shared by tests of several stages."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.joint_graphs import Captured, capture_one

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


class EncoderDecoder(nn.Module):
    """PyTorch's own transformer between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 2, 3, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.source(x), self.target(x)))


class Shared(nn.Module):
    """One layer called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(4):
            x = self.layer(x)
        return x.sum()


def ids() -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, TOKENS))


def loss_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


@functools.cache
def gpt() -> Captured:
    """One GPT with its loss, shared by tests that only read it."""
    torch.manual_seed(0)
    return capture_one(loss_of(GPT()), ids())
