"""A GPT in plain PyTorch: nothing in it knows of autohete_fx."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT. ``vocab_size`` 256: one token a byte."""

    vocab_size: int = 256
    context: int = 256
    layers: int = 8
    width: int = 192
    heads: int = 6
    dropout: float = 0.1
    tied_embedding: bool = False


class Attention(nn.Module):
    """Causal self-attention with rotary positions, (batch, time, width) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One transformer layer, normalised before attention and before the MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Next-token predictor. With ``targets`` it returns the mean loss, without them the logits.

    Shapes: ``tokens`` and ``targets`` are (batch, time) of int64; logits are (batch, time, vocab_size).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        angles = rotary_angles(config.context, config.width // config.heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        std = 0.7 * self.config.width**-0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("out.weight", "down.weight")):  # what is added to the residual stream
                nn.init.normal_(parameter, std=std * (2 * self.config.layers) ** -0.5)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=std)
        if self.config.tied_embedding:
            self.head.weight = self.embedding.weight
        else:
            nn.init.normal_(self.embedding.weight)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.7, top_k: int = 30) -> Tensor:
        """Append ``count`` sampled tokens to each row of ``tokens``, (batch, time) of int64.

        It runs eagerly: every step has another length, and a compiled graph would be made for each.
        """
        for _ in range(count):
            logits = self.forward(tokens[:, -self.config.context :])[:, -1].float() / temperature
            kth = logits.topk(top_k).values[:, -1:]
            chances = logits.masked_fill(logits < kth, float("-inf")).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens


def rotary_angles(context: int, head_width: int) -> Tensor:
    """Angle of each pair of features at each position, (context, head_width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    return torch.arange(context)[:, None] * frequencies


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the feature pairs of (batch, heads, time, head width) by their positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
