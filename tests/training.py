"""A small GPT, how it is trained, and what must agree: shared by the tests of the main job on every device.

Values are compared on the CPU. The reference optimizer is ``torch.optim.AdamW(fused=True)`` on the processor that does
each update, because the fused kernels of a CPU and a GPU round differently: what a plan steps on the host, the reference
steps on the CPU.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.runtime.meter import device_live_bytes
from tests.references import ReferenceAdamW, adamw, copied

LABELS = ("prologue", "layers.0", "layers.1", "layers.2", "epilogue")
HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
KEPT = BlockDecision(params=Params.HOST, keeps_fetched=True)
STREAMED = BlockDecision(optimizer=Optimizer.STREAMED)
PLANS: dict[str, tuple[BlockDecision, ...]] = {
    "keep": (BlockDecision(),) * 5,
    "recompute": (BlockDecision(activations=Activations.RECOMPUTE),) * 5,
    "selective": (BlockDecision(activations=Activations.SELECTIVE),) * 5,
    "offload": (BlockDecision(activations=Activations.OFFLOAD),) * 5,
    "host-params": (BlockDecision(params=Params.HOST, prefetch_distance=2),) * 5,
    "kept": (KEPT,) * 5,
    "host-optimizer": (BlockDecision(optimizer=Optimizer.HOST),) * 5,
    "mixed": (
        BlockDecision(params=Params.HOST),
        HOST,
        BlockDecision(activations=Activations.RECOMPUTE, params=Params.HOST, optimizer=Optimizer.HOST),
        BlockDecision(activations=Activations.OFFLOAD, optimizer=Optimizer.HOST, prefetch_distance=2),
        BlockDecision(activations=Activations.SELECTIVE, optimizer=Optimizer.HOST),
    ),
    "mixed in part": (
        KEPT,
        dataclasses.replace(HOST, keeps_fetched=True, num_offloaded=3),
        dataclasses.replace(KEPT, activations=Activations.RECOMPUTE, optimizer=Optimizer.HOST, prefetch_distance=2),
        BlockDecision(activations=Activations.OFFLOAD, optimizer=Optimizer.HOST, num_offloaded=1, prefetch_distance=2),
        dataclasses.replace(KEPT, activations=Activations.OFFLOAD, num_offloaded=1),
    ),
    "streamed": (
        STREAMED,
        dataclasses.replace(
            STREAMED, params=Params.HOST, prefetch_distance=2, num_moved_states=1, other_states=Optimizer.HOST
        ),
        dataclasses.replace(STREAMED, activations=Activations.RECOMPUTE, num_moved_states=2),
        BlockDecision(optimizer=Optimizer.HOST, num_moved_states=2, other_states=Optimizer.STREAMED),
        dataclasses.replace(STREAMED, params=Params.HOST, keeps_fetched=True),
    ),
}
MIXED = ("mixed", "mixed in part")
PLANS["disk"] = (
    BlockDecision(params=Params.HOST, optimizer=Optimizer.DISK),
    dataclasses.replace(HOST, optimizer=Optimizer.DISK),
    BlockDecision(activations=Activations.RECOMPUTE, optimizer=Optimizer.DISK, num_moved_states=3),
    dataclasses.replace(HOST, num_moved_states=2, other_states=Optimizer.DISK),
    BlockDecision(optimizer=Optimizer.DISK),
)
IDLE = ("keep", "recompute", "selective")
"""Plans that give lanes nothing to do."""
WITHOUT_UPDATES = (*IDLE, "offload", "host-params", "kept")
"""Plans that give lanes no update."""
STEPS = int(os.environ.get("AUTOHETE_TEST_STEPS", "4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model and its batches."""

    width: int = 64
    heads: int = 4
    layers: int = 3
    batch: int = 8
    time: int = 64


SMALL = Sizes()


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (t.view(batch, time, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, sizes: Sizes = SMALL, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, 128, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def make(device: str, sizes: Sizes = SMALL, *, tied: bool = False) -> Model:
    """The same model every time, on every device."""
    torch.manual_seed(0)
    return Model(sizes, tied).to(device)


def batch(device: str, step: int, micro_batch: int = 0, sizes: Sizes = SMALL) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randint(128, (sizes.batch, sizes.time), generator=generator).to(device)


def device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def train(
    model: Model,
    optimizer: Any,
    *,
    sizes: Sizes = SMALL,
    micro_batches: int = 1,
    clip: bool = False,
    between: Callable[[Model], list[Tensor]] | None = None,
    peaks: list[int] | None = None,
) -> list[Tensor]:
    """Everything that must agree: losses, every gradient of every step, what ``between`` reads, parameters, states.

    ``peaks`` gets the peak device bytes of every micro-batch, the compiling one included, and of every optimizer step.
    """
    seen: list[Tensor] = []
    peaks = [] if peaks is None else peaks
    device = device_of(model)
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            torch.manual_seed(1000 * step + micro_batch)
            tokens = batch(device, step, micro_batch, sizes)
            is_last = micro_batch == micro_batches - 1
            with (
                autohete_fx.MemoryMeter(device) as meter,
                contextlib.nullcontext() if is_last else collecting(optimizer),
            ):
                loss = model(tokens)
                loss.backward()
            peaks.append(meter.peak_bytes)
            seen.append(copied(loss))
        if clip:
            seen.append(copied(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        seen.extend(copied(p.grad) for p in model.parameters() if p.grad is not None)
        with autohete_fx.MemoryMeter(device) as meter:
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(meter.peak_bytes)
        if between is not None:
            seen.extend(map(copied, between(model)))
    seen.extend(map(copied, model.parameters()))
    states = optimizer.state_dict()["state"]
    moments = ((i, name) for i in sorted(states) for name in sorted(states[i]) if name not in ("step", "master"))
    seen.extend(copied(states[i][name]) for i, name in moments)
    return seen


def collecting(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Around the micro-batches of a step but the last."""
    return optimizer.accumulate() if hasattr(optimizer, "accumulate") else contextlib.nullcontext()


def ours(
    model: Model,
    inner: str,
    options: dict[str, Any],
    overlap: str | None = "step",
    made: Callable[[nn.Module, str | None], Any] = adamw,
    **how: Any,
) -> list[Tensor]:
    """What training with the backend gives, by an optimizer that is made for the model and an overlap."""
    optimizer = made(model, overlap)
    model.compile(backend="autohete", options={"inner_backend": inner, "profile": "analytic", **options})
    result = train(model, optimizer, **how)
    torch._dynamo.reset()
    return result


def plain(model: Model, inner: str, reference: Callable[[nn.Module], Any] | None = None, **how: Any) -> list[Tensor]:
    """What training without the backend gives, by AdamW or another reference, each parameter stepped where the last compilation of
    ours has it. Many tests ask for the same: equal models are trained once, and the one given may come back untrained."""
    on_host = (
        frozenset() if device_of(model) == "cpu" else stepped_on_host()
    )  # on a CPU device both are the same processor
    key = (inner, STEPS, on_host, reference, tuple(sorted(how.items(), key=lambda item: item[0])), _identity(model))
    if key not in _trained_plainly:
        compile_plainly(model, inner)
        optimizer = ReferenceAdamW(model, on_host) if reference is None else reference(model)
        _trained_plainly[key] = train(model, optimizer, **how)
        torch._dynamo.reset()
    return _trained_plainly[key]


_trained_plainly: dict[Any, list[Tensor]] = {}


def uncompiled(model: Model, made: Callable[[nn.Module], Any] = adamw, **how: Any) -> list[Tensor]:
    """What eager code gives with our optimizer, whose states are all on the device then. It is for parameters in 16 bits, which
    PyTorch's optimizers have no masters of, and a model without dropout (`computes_alike`)."""
    assert not model.training
    return train(model, made(model), **how)


def compile_plainly(model: Model, inner: str) -> None:
    """As training without us does whose kernels are those of ours with an inner backend."""
    if inner == "inductor":
        model.compile(backend="inductor")
    elif not computes_alike(model):
        model.compile(backend="aot_eager")


def computes_alike(model: nn.Module) -> bool:
    """Whether eager code computes bit by bit as graphs do node by node: on a CPU, but for the factor of dropout in 16 bits."""
    return all(p.device.type == "cpu" and p.dtype.itemsize >= 4 for p in model.parameters())


def _identity(model: Model) -> str:
    """What tells models apart that do not train alike: structure, mode, which parameters are shared or frozen, values."""
    told = hashlib.sha256(f"{model!r} {model.training} {device_of(model)}".encode())
    for name, p in model.named_parameters():
        told.update(f"{name} {p.dtype} {p.shape} {p.requires_grad}".encode())
        told.update(copied(p).view(torch.uint8).numpy())
    return told.hexdigest()


def stepped_on_host() -> frozenset[str]:
    """Names of the parameters that the last compilation of ours steps on the host: of a block it may be some."""
    moved = training_compilation().moved
    return frozenset(name for name, place in moved.items() if place.updates_on_host)


def training_compilation() -> autohete_fx.Compilation:
    """The latest one of a training graph."""
    return next(c for c in reversed(autohete_fx.compilations()) if c.training)


def assert_copies(name: str) -> None:
    """The last compilation, of that plan, copies what the plan moves."""
    kinds = {t.op for t in training_compilation().transfers}
    wanted = {"offload": {"offload", "reload"}, "host-params": {"prefetch"}, "host-optimizer": {"offload"}}
    assert kinds >= wanted.get(name, set())
    assert bool(kinds) == (name not in IDLE)


def assert_equal(given: list[Tensor], expected: list[Tensor], *, bitwise: bool) -> None:
    assert len(given) == len(expected)
    if bitwise:
        apart = {
            at: _apart(*pair) for at, pair in enumerate(zip(given, expected, strict=True)) if not torch.equal(*pair)
        }
        assert not apart, f"of {len(given)} tensors these differ, by so much of their largest value: {apart}"
        return
    for ours_value, plain_value in zip(given, expected, strict=True):
        torch.testing.assert_close(ours_value, plain_value, atol=1e-4, rtol=1e-3)


def _apart(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


def plan(name: str) -> Plan:
    return Plan(labels=LABELS, decisions=PLANS[name])


def evaluate(model: Model) -> list[Tensor]:
    """Reads of every public kind between two steps."""
    model.eval()
    with torch.no_grad():
        loss = model(batch(device_of(model), 99))
    model.train()
    weight = copy.deepcopy(model.layers[0].up.weight)
    return [loss, weight, model.state_dict()["layers.1.down.weight"], model.layers[2].up.weight.norm()]


def frozen(model: Model) -> Model:
    model.embedding.weight.requires_grad_(False)
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    return model


@contextlib.contextmanager
def in_one_order(device: str) -> Iterator[None]:
    """A GPU's kernels add up in the same order each time. Else an embedding's gradient is added up by whoever comes first, where
    few rows are looked up often. What PyTorch has no such kernel for, it warns of."""
    if device == "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings: Any = torch.utils.deterministic
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = before


def warm_up(device: str) -> None:
    """Pay what a process pays once: the machine's figures, and on a GPU the workspace of cuBLAS in either thread."""
    if device not in _warmed_up:
        autohete_fx.preview(make(device), batch(device, 0), options={"profile": "analytic", "inner_backend": "eager"})
        make(device)(batch(device, 0)).backward()
        _warmed_up.add(device)
    torch._dynamo.reset()
    gc.collect()


_warmed_up: set[str] = set()
"""Devices, whose figures are in the cache that tests share."""


@functools.cache
def plain_run(device: str, inner: str, sizes: Sizes, on_host: frozenset[str] = frozenset()) -> tuple[list[Tensor], int]:
    """What plain training gives, and its peak device bytes over every step."""
    foreign_bytes, peaks = device_live_bytes(device), []
    model = make(device, sizes)
    compile_plainly(model, inner)
    seen = train(model, ReferenceAdamW(model, on_host), sizes=sizes, peaks=peaks)
    torch._dynamo.reset()
    return seen, max(peaks) - foreign_bytes


def budgeted_run(device: str, inner: str, sizes: Sizes, budget_bytes: int) -> tuple[list[Tensor], int]:
    """Likewise with the planner's own plan for a budget."""
    foreign_bytes, peaks = device_live_bytes(device), []
    options = {"memory_budget": budget_bytes}
    seen = ours(make(device, sizes), inner, options, sizes=sizes, peaks=peaks)
    return seen, max(peaks) - foreign_bytes
