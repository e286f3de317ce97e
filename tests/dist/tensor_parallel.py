"""Models under tensor parallelism, and one process that has them whole."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import autohete_fx

VOCABULARY, WIDTH, HEADS = 100, 96, 4


class Block(nn.Module):
    """Heads are told by the width of what the projections give, so that a rank may have some of them."""

    def __init__(self, dropout: float, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )  # a bias of keys has no gradient
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        heads = (f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.o(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.1, layers: int = 2, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout, hidden) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def make(**how: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**how).double()


def parallel(model: GPT, over: Any = None) -> GPT:
    """As PyTorch's tutorial has it, the head by columns, too; over all ranks, or a mesh."""
    styles: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for at in range(len(model.layers)):
        styles |= {f"layers.{at}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        styles |= {f"layers.{at}.{name}": RowwiseParallel() for name in ("o", "down")}
    return parallelize_module(model, over or mesh(), styles)


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def tokens(step: int, micro: int = 0, batch: int = 4, length: int = 32) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(100 * step + micro))


def whole(t: Tensor, like: Tensor | None = None) -> Tensor:
    """The whole of a parameter or a gradient, or of a state of the parameter ``like``."""
    if isinstance(like, DTensor) and not isinstance(t, DTensor):
        t = DTensor.from_local(
            t, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 2,
    first: int = 0,
    micro: int = 1,
    clip: float | None = None,
    batch_of: Callable[..., Any] = tokens,
) -> dict[str, Tensor]:
    """Losses, gradients, norms, parameters and states by name; ``clip``: by PyTorch, for optimizers that clip nothing."""
    found: dict[str, Tensor] = {}
    for step in range(first, steps):
        for at in range(micro):
            torch.manual_seed(7 + 100 * step + at)  # one mask on all ranks, of what all ranks have whole
            gathers = at < micro - 1 and isinstance(optimizer, autohete_fx.AdamW)
            with optimizer.accumulate() if gathers else contextlib.nullcontext():  # type: ignore[attr-defined]
                loss = model(batch_of(step, at))
                loss.backward()
            found[f"{step}/loss{at}"] = loss.detach().clone()
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[f"{step}/{name}/grad"] = whole(param.grad)
        if clip is not None:
            found[f"{step}/norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if getattr(optimizer, "grad_norm", None) is not None:
            found[f"{step}/norm"] = optimizer.grad_norm.clone()  # type: ignore[attr-defined]
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            found[f"{step}/{name}"] = whole(param)
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    found[f"{step}/{name}/{key}"] = whole(value, param)
    return found


def largest_difference(given: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert given.keys() == expected.keys(), sorted(given.keys() ^ expected.keys())
    return max((float((given[n] - expected[n]).abs().max()), n) for n in given)


def sequence_parallel(model: GPT, over: Any = None) -> GPT:
    """Between products each rank has some of the positions, and norms compute on those. Dropout would draw other masks."""
    rows, columns = Shard(1), Replicate()
    styles: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=columns, output_layouts=rows),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=columns),
    }
    for at in range(len(model.layers)):
        styles |= {f"layers.{at}.{name}": SequenceParallel() for name in ("norm_1", "norm_2")}
        styles |= {f"layers.{at}.{name}": ColwiseParallel(input_layouts=rows) for name in ("q", "k", "v", "up")}
        styles |= {f"layers.{at}.{name}": RowwiseParallel(output_layouts=rows) for name in ("o", "down")}
    return parallelize_module(model, over or mesh(), styles)
