"""What all systems share: the case, the model, the training step and the levels of recomputation.

Numerics are the same everywhere unless a system says otherwise: bf16 parameters, activations and gradients in forward and
backward, fp32 master weights and moments in AdamW, the loss in fp32. Every system starts from the same weights, rounded to
bf16, whatever its parameters' dtype is, and sees the same tokens; attention is ``F.scaled_dot_product_attention``.
"""

import functools
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gpt import GPT, GPTConfig, rotary_angles

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
SIZES = {
    "1b": (16, 2048),
    "2b": (24, 2560),
    "3b": (24, 3072),
    "4b": (33, 3072),
    "5b": (24, 4096),
    "6b": (28, 4096),
    "7b": (33, 4096),
    "8b": (38, 4096),
}
"""Layers and width, smallest first; heads are 128 wide."""
_DRY_SIZES = {name: (2 + index, 128) for index, name in enumerate(SIZES)}
RECOMPUTE_LEVELS = ("full", "selective", "none")
"""Of what a block recomputes in backward, by rising memory."""

SCHEDULES = {
    "inside step()": (None, True),
    "next forward, as gradients came": ("step", False),
    "next forward, by priority": ("step", True),
    "from backward on, as gradients came": ("backward", False),
    "from backward on, by priority": ("backward", True),
}
"""Of our updates: what they overlap, and whether the block that the next forward needs first comes first."""

_SAVED_BY_SELECTIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""As torchtitan chooses: matrix products and attention are kept, the rest is computed again."""


class CannotRun(Exception):
    """A system does not support a case, or something that it needs is not here; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one process trains.

    Attributes:
        system, size: names in `SYSTEMS` and `SIZES`.
        cap_gb: device memory that the process may take, in 1e9 bytes (1e6 in dry mode); None for all of it.
        batch: sequences of an optimizer step, over all micro-batches.
        micro_batches: forward and backward passes of an optimizer step.
        clip: clip gradients to a global norm of 1.
        levels: what to measure one after another, by rising memory.
        steps, warm_up: measured and unmeasured steps of each level.
        dry: tiny models on the CPU.
        inductor: compile with it; else trace only.
        plan: replay this plan file under the schedules that ``levels`` name (ours).
        folder: where a process of ours leaves its plan and its trace; empty: nowhere.
    """

    system: str
    size: str
    cap_gb: float | None = None
    batch: int = 8
    micro_batches: int = 1
    clip: bool = False
    levels: tuple[str, ...] = ()
    steps: int = 8
    warm_up: int = 3
    dry: bool = False
    inductor: bool = True
    plan: str | None = None
    folder: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def cap_bytes(self) -> int | None:
        return None if self.cap_gb is None else int(self.cap_gb * (1e6 if self.dry else 1e9))

    @property
    def state_bytes(self) -> int:
        """Parameters, their gradients, fp32 masters and moments: 16 bytes a parameter, in either of the ways to be mixed."""
        return 16 * self.num_params

    @property
    def num_params(self) -> int:
        """Of the model's matrices."""
        config = self.config
        return config.layers * 12 * config.width**2 + 2 * config.vocab_size * config.width

    @property
    def backend(self) -> str:
        """For ``torch.compile``."""
        return "inductor" if self.inductor else "aot_eager"

    @property
    def config(self) -> GPTConfig:
        """The model: byte pairs as tokens, no dropout, so that losses can be compared."""
        layers, width = (_DRY_SIZES if self.dry else SIZES)[self.size]
        return GPTConfig(
            vocab_size=512 if self.dry else 50304,
            context=32 if self.dry else 1024,
            layers=layers,
            width=width,
            heads=width // (32 if self.dry else 128),
            dropout=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What of the model a system keeps on the host, for the roofline; each from 0 to 1.

    Attributes:
        optimizer: parameters that the CPU updates.
        streamed: parameters whose states are on the host, and go to the device and back for each update.
        params: parameters that live on the host.
        fetched_once: of those, the share that is not fetched again for backward.
        activation_bytes: offloaded, of one micro-batch.
        recompute: of the forward's products, what is computed again.
    """

    optimizer: float = 0.0
    streamed: float = 0.0
    params: float = 0.0
    fetched_once: float = 0.0
    activation_bytes: int = 0
    recompute: float = 0.0


class System(ABC):
    """A model in training.

    Attributes:
        case: what is trained.
        model, optimizer: as the system wants them; set by the constructor.
        level: the one that is measured.
        when_profiled: called once nothing is timed any more to make a plan.
    """

    levels: ClassVar[tuple[str, ...]] = RECOMPUTE_LEVELS
    is_offloading: ClassVar[bool] = True
    """Whether any of the model's states leaves the device."""
    model: Any
    optimizer: Any

    def __init__(self, case: Case) -> None:
        self.case = case
        self.level = case.levels[0]
        self.when_profiled: Callable[[], None] = lambda: None

    @classmethod
    def reason_against(cls, case: Case) -> str:
        """Why a case cannot run, as far as that is known before anybody tries; else empty."""
        del case
        return ""

    @abstractmethod
    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a micro-batch; (sequences, context) of int64 each."""

    @abstractmethod
    def shares(self) -> Shares:
        """What is on the host and what is recomputed."""

    def set_level(self, level: str) -> None:
        """Measure this one from now on."""
        self.level = level
        for layer in self.model.layers:
            layer.level = level

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around each forward and its backward."""
        del is_last
        return nullcontext()

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step on (batch, context) tokens; returns the mean loss."""
        count = self.case.micro_batches
        losses = []
        for index, (part, wanted) in enumerate(zip(tokens.chunk(count), targets.chunk(count), strict=True)):
            with self.micro_batch(is_last=index == count - 1):
                loss = self.loss_of(part, wanted)
                (loss if count == 1 else loss / count).backward()
            losses.append(loss.detach())
        if self.case.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def figures(self) -> dict[str, Any]:
        """More to report of the steps so far."""
        return {}

    def finish(self) -> None:
        """Called when all levels were reported."""
        return

    def recompute_share(self) -> float:
        """Of the forward's products; selective recomputation repeats none of them."""
        return 1.0 if self.level == "full" else 0.0


def file_of(case: Case, what: str, *, micro_batches: int | str | None = None) -> Path:
    """Where a process of ours leaves a plan or a trace. Plans know nothing of clipping: with it, compiled code comes from a cache,
    and nothing is solved that AutoHete's three integers could be found for."""
    words = (case.system, case.size, case.cap_gb, case.batch, micro_batches or case.micro_batches, what)
    return Path(case.folder) / f"{'_'.join(map(str, words))}.json"


def what_is_missing(package: str) -> str:
    """That a package is not installed, if so."""
    return "" if importlib.util.find_spec(package) else f"the package {package} is not installed"


class RecomputedBlock(nn.Module):
    """A block that keeps or recomputes its activations, as ``level`` says now."""

    def __init__(self, block: nn.Module, level: str) -> None:
        super().__init__()
        self.block = block
        self.level = level

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.level == "full":
            return checkpoint(self.block, x, cos, sin, use_reentrant=False)
        if self.level == "selective":
            return checkpoint(self.block, x, cos, sin, use_reentrant=False, context_fn=_selective)
        return self.block(x, cos, sin)


_selective = functools.partial(create_selective_checkpoint_contexts, _SAVED_BY_SELECTIVE)


def new_model(case: Case, device: torch.device | str, dtype: torch.dtype) -> GPT:
    """The case's model with the weights that every system starts from.

    They are drawn on the compute device, which takes seconds less than on a CPU, one parameter at a time, so that a model
    larger than the device can be made on the CPU.
    """
    with torch.device("meta"):
        model = GPT(case.config)
    model = model.to(dtype).to_empty(device=device)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data.copy_(_first_values(name, parameter.shape, index, case))
    angles = rotary_angles(case.config.context, case.config.width // case.config.heads)
    model.cos.copy_(angles.cos())
    model.sin.copy_(angles.sin())
    return model.train()


def _first_values(name: str, shape: torch.Size, index: int, case: Case) -> Tensor:
    """GPT-2's initialisation, rounded to bf16."""
    values = torch.empty(shape, device=case.device)
    if len(shape) > 1:
        into_residual = name.endswith(("out.weight", "down.weight"))
        std = 0.02 * ((2 * case.config.layers) ** -0.5 if into_residual else 1.0)
        values.normal_(std=std, generator=torch.Generator(case.device).manual_seed(index))
    else:
        values.fill_(float("norm" in name and name.endswith("weight")))
    return values.bfloat16()


def recompute_by_level(model: GPT, level: str) -> None:
    """Wrap the layers, in place."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = RecomputedBlock(layer, level)


class CompiledByBlock(System):
    """A system that compiles each block, and the loss, by themselves, so that its hooks run between blocks."""

    def prepare_blocks(self, model: GPT) -> None:
        """Wrap and compile the layers of a model, in place, and make the loss."""
        recompute_by_level(model, self.level)
        for layer in model.layers:
            layer.compile(backend=self.case.backend, dynamic=False)
        self._cross_entropy = torch.compile(_cross_entropy, backend=self.case.backend, dynamic=False)

    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._cross_entropy(self.model(tokens), targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
