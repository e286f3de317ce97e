"""Models for ranks that hold them together, and what one process that has all batches makes of them."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autohete_fx
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.parts import part_of

DEVICE = os.environ.get("DEVICE_OF_RANKS", "cpu")
FAST = {
    "forward_s": 1e-3,
    **dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s", "update_params_per_s", "net_bytes_per_s"), 1e9),
    "num_ranks": 2,
}
"""Of an emulated machine (`examples.benchmarks.emulated.Speeds`) whose lanes take next to no time."""
PLAIN = None if DEVICE == "cpu" else "aot_eager"
"""What one process is compiled with. On a CPU, eager code computes bit by bit as graphs do node by node, but in 16 bits."""
VOCABULARY, WIDTH = 131, 96  # odd: the last rank's rows are padded


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 301), nn.Linear(301, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tied embeddings, a frozen weight, one that nothing reads, a wide one of a single row, and small ones."""

    def __init__(self, dropout: float = 0.1, layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.row = nn.Parameter(torch.randn(1, WIDTH * WIDTH) / 20)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.frozen(x) * self.scale + x @ self.row.view(WIDTH, WIDTH)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Small(nn.Module):
    """Blocks as of `Net`, of which Inductor makes few kernels: each takes a C++ compiler seconds. Vectors are no shards, and one
    matrix has a row of padding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 273), nn.Linear(273, 128, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(273, 128), nn.GELU(), nn.Linear(128, 273), nn.Dropout(dropout)) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens.to(self.first.weight.dtype) / VOCABULARY)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def make(dtype: torch.dtype = torch.float64, seed: int = 0, kind: Callable[..., Any] = Net, **how: Any) -> Any:
    torch.manual_seed(seed)
    return kind(**how).to(DEVICE, dtype)


def tokens(step: int, rank: int, micro: int = 0, batch: int = 4, length: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(VOCABULARY, (batch, length), generator=generator).to(DEVICE)


def seed_masks(step: int, rank: int, micro: int = 0) -> None:
    """Dropout differs by rank, and is what the one process draws for that rank's batch."""
    torch.manual_seed(7 + 1000 * step + 10 * rank + micro)


def mesh(replicas: int | None = None) -> Any:
    """Of all ranks; of two dimensions where a number of replicas is given, which may be 1."""
    count = dist.get_world_size()
    return init_device_mesh(DEVICE, (count,) if replicas is None else (replicas, count // replicas))


def from_first(make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the first rank makes, which the others need not compute again."""
    _making.append(make)
    try:
        found = [make() if dist.get_rank() == 0 else None]
    finally:
        _making.pop()
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


_making: list[Callable[[], dict[str, Tensor]]] = []
"""What this rank is making for all of them."""


def whole(tensor: Tensor, param: Tensor) -> Tensor:
    """What all ranks' parts are together: of the parameter, its gradient or a state."""
    part = part_of(param)
    assert part is not None
    if not part.is_shard:
        return tensor.detach().clone()
    return torch.ops.autohete.gather(tensor.detach(), part.ranks.count, part.group)[: part.size[0]]


LengthOf = Callable[[int, int], int]
OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Records:
    """What a step left, by name: losses, gradients, norms, parameters and states."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, read: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        for name, param in model.named_parameters():
            self.values[f"{step}/{name}"] = read(param, param)
            for key, value in sorted(optimizer.state.get(param, {}).items()):
                if isinstance(value, Tensor) and value.dim():
                    self.values[f"{step}/{name}/{key}"] = read(value, param)

    def add_gradients(self, step: int, model: nn.Module, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        for name, param in model.named_parameters():
            if param.grad is not None:
                self.values[f"{step}/{name}/grad"] = read(param.grad, param)


def alone(
    optimizer_of: OptimizerOf,
    steps: int = 3,
    micro: int = 1,
    clip: float | None = None,
    backend: str | None = PLAIN,
    length_of: LengthOf = lambda step, rank: 32,
    **how: Any,
) -> dict[str, Tensor]:
    """One process, the first rank's, which computes each rank's batch in turn; eagerly, where there is no backend."""
    if DEVICE == "cpu" and not _making:  # on GPUs each rank has a device, and needs its own
        given = {"steps": steps, "micro": micro, "clip": clip, "backend": backend, "length_of": length_of, **how}
        return from_first(lambda: alone(optimizer_of, **given))
    model, count, records = make(**how), dist.get_world_size(), Records()
    if backend is not None:
        model.compile(backend=backend)
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        for at in range(micro):
            for rank in range(count):
                seed_masks(step, rank, at)
                loss = model(tokens(step, rank, at, length=length_of(step, rank)))
                loss.backward()
                records.values[f"{step}/loss{at}/{rank}"] = loss.detach().clone()
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= count
        records.add_gradients(step, model, lambda t, _: t.clone())
        if clip is not None:
            records.values[f"{step}/norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        records.add(step, model, optimizer, lambda t, _: t.detach().clone())
    return records.values


def together(
    optimizer_of: OptimizerOf,
    steps: int = 3,
    micro: int = 1,
    compiled: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    replicas: int | None = None,
    length_of: LengthOf = lambda step, rank: 32,
    **how: Any,
) -> dict[str, Tensor]:
    """All ranks with a shard each, of so many copies. What is this rank's alone has its number."""
    if compiled is not None:
        torch._dynamo.reset()  # plans are made for each model
    model = shard(make(seed=dist.get_rank(), **how), mesh(replicas))
    optimizer = optimizer_of(model.parameters())
    prepare(model)
    model.compile(**(compiled or {"backend": "aot_eager"}))
    return recorded(model, optimizer, steps=steps, micro=micro, read=whole, length_of=length_of)


def recorded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    micro: int = 1,
    read: Callable[[Tensor, Tensor], Tensor],
    length_of: LengthOf = lambda step, rank: 32,
) -> dict[str, Tensor]:
    """Of this rank's batches. ``read``: makes a whole of this rank's part of a parameter, its gradient or a state, and of that."""
    rank, records = dist.get_rank(), Records()
    for step in range(steps):
        for at in range(micro):
            seed_masks(step, rank, at)
            is_last = at == micro - 1 or not isinstance(optimizer, autohete_fx.AdamW)
            with contextlib.nullcontext() if is_last else optimizer.accumulate():
                loss = model(tokens(step, rank, at, length=length_of(step, rank)))
                loss.backward()
            records.values[f"{step}/loss{at}/{rank}"] = loss.detach().clone()
        kept = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        for name, param in model.named_parameters():
            if name in kept:
                records.values[f"{step}/{name}/grad"] = read(_mean(kept[name], param, optimizer), param)
        if getattr(optimizer, "grad_norm", None) is not None:
            records.values[f"{step}/norm"] = optimizer.grad_norm.clone()
        optimizer.zero_grad()
        records.add(step, model, optimizer, read)
    return records.values


def _mean(gradient: Tensor, param: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """A gradient over all ranks: a shard's as backward left it, a small one's as the step made it, unless it clipped that."""
    part = part_of(param)
    if part is None:
        return gradient
    if part.is_shard:
        if part.averaged_over is not None:
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=part.averaged_over)
        return gradient
    if getattr(optimizer, "max_grad_norm", None) is None:
        assert param.grad is not None
        return param.grad
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    return gradient


def graphs_in(compilation: autohete_fx.Compilation) -> list[str]:
    """The text of forward and backward, without names that a process gives at will: those of sessions, and of symbols of sizes."""
    texts = (compilation.readable(graph) for graph in ("forward", "backward"))
    return [re.sub(r"\bs\d+\b", "symbol", re.sub("'[0-9a-f]{16}'", "session", text)) for text in texts]


def differences(given: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """How far apart two records are, where they are at all, by name; what this rank does not know of the others is left out."""
    rank = dist.get_rank()
    names = {n for n in expected if "/loss" not in n or n.endswith(f"/{rank}")}
    assert names == set(given), sorted(names ^ set(given))
    return {n: float((given[n] - expected[n]).abs().max()) for n in names if not torch.equal(given[n], expected[n])}


def refusal(attempt: Callable[[], object]) -> str:
    """What an attempt is refused with."""
    try:
        attempt()
    except autohete_fx.AutoHeteError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"
