"""Decisions: what may be chosen for each block, and the schedule of the updates on the host."""

import enum
from dataclasses import dataclass

from autohete_fx.errors import PlanError

GATHER_DISTANCE = 1
"""How many blocks ahead of its use a gather is issued, and how many after its backward a block's reduce is waited for."""


class Activations(enum.Enum):
    """The treatment of a block's saved activations between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    SELECTIVE = "selective"
    """Results of matrix products, attention and other expensive kernels are kept; the rest is computed again."""

    @property
    def recomputes(self) -> bool:
        """Whether anything of the block's forward runs again in backward."""
        return self in (Activations.RECOMPUTE, Activations.SELECTIVE)


PARTIAL = tuple(kind for kind in Activations if kind.recomputes and kind is not Activations.RECOMPUTE)
"""The treatments that compute a part again. `graph.recompute` says which part."""


class Params(enum.Enum):
    """Where a block's parameters live between their uses."""

    DEVICE = "device"
    HOST = "host"


class Optimizer(enum.Enum):
    """Where a block's optimizer states live and its step runs."""

    DEVICE = "device"
    HOST = "host"
    STREAMED = "streamed"
    """States on the host; for each step they are copied to the device, updated there, and copied back."""
    DISK = "disk"
    """States on disk.

    For each step the CPU reads them into RAM, updates them there, and writes them back, a window of a parameter at a time.
    Gradients are in host memory, as for ``HOST``.
    """

    @property
    def updates_on_host(self) -> bool:
        """Whether the CPU does the step."""
        return self in (Optimizer.HOST, Optimizer.DISK)


def staging_bytes(state_bytes: int) -> int:
    """Device memory for pieces of a block's streamed states, given the bytes of those. All blocks' pieces pass through what is
    taken for all of them together."""
    return min(state_bytes // 8, 24 * 2**20)


STAGING_SLOTS = 3
"""Parts of all staging that are used in turn: one fills, one empties, and one is in between."""
MOST_STAGING_BYTES = 192 * 2**20
"""The most for all blocks. Copies of a third of it should last longer than it takes to issue them, as they do on PCIe."""


class Overlap(enum.Enum):
    """The work that the optimizer's updates on the host overlap with."""

    NONE = "none"
    """Nothing: they run inside ``optimizer.step()``."""
    STEP = "step"
    """They start at ``optimizer.step()`` and overlap the next forward."""
    BACKWARD = "backward"
    """Where gradients are not clipped they start as soon as a gradient is on the host; else as ``STEP``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When updates on the host run, and in which order.

    Attributes:
        overlap: see the enum.
        priority: the block that the next forward needs first is updated first; else in the order in which gradients come.
        takes_norms: backward takes the norms of gradients before they leave the device: for clipping with ``BACKWARD``.
    """

    overlap: Overlap = Overlap.NONE
    priority: bool = True
    takes_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDecision:
    """The decisions for one block.

    Attributes:
        activations, params, optimizer: see the enums.
        prefetch_distance: how many blocks ahead of its use a copy to the device is issued, at least 1. That holds for
            parameters in forward and backward, offloaded activations in backward, and streamed optimizer states. As many blocks
            later a copy to the host is waited for: activations, gradients, states. Irrelevant where nothing of the block is
            copied.
        keeps_fetched: parameters that were fetched from the host, or gathered from all ranks, stay on the device from the
            block's forward to its backward. That saves the second fetch and the second gather. Without meaning where the block
            neither fetches nor gathers; plans that say so there are refused.
        replicates: whole parameters that were gathered from all ranks stay on the device until a step changes them. They are
            gathered once a step, whatever micro-batches it has, and not again for backward. Shards, which are what a step
            updates, are on the device, too. A tied parameter of another block that is in host memory is gathered each time.
            Likewise refused where the block gathers nothing.
        num_moved_states: of the block's trainable parameters, how many have their optimizer states where ``optimizer`` says,
            smallest first. None: all of them.
        other_states: where the optimizer states of the other trainable parameters are.
        num_offloaded: of the block's tensors that can leave, how many do, largest first; None: all of them.
    """

    activations: Activations = Activations.KEEP
    params: Params = Params.DEVICE
    optimizer: Optimizer = Optimizer.DEVICE
    prefetch_distance: int = 1
    keeps_fetched: bool = False
    replicates: bool = False
    num_moved_states: int | None = None
    other_states: Optimizer = Optimizer.DEVICE
    num_offloaded: int | None = None

    @property
    def recomputes(self) -> bool:
        """Whether anything of the block's forward runs again in backward."""
        return self.activations.recomputes

    @property
    def updates_on_host(self) -> bool:
        """Whether the CPU does the block's optimizer step, or a part of it."""
        return self.optimizer.updates_on_host or self.other_states.updates_on_host

    @property
    def streams(self) -> bool:
        """Whether the states of any of the block's parameters are streamed."""
        return Optimizer.STREAMED in (self.optimizer, self.other_states)

    def __post_init__(self) -> None:
        if self.prefetch_distance < 1:
            raise PlanError(f"prefetch_distance is {self.prefetch_distance}; expected at least 1")
        if self.replicates and (self.keeps_fetched or self.params is not Params.DEVICE):
            raise PlanError(
                f"replicates is given with params {self.params.value!r} and keeps_fetched {self.keeps_fetched}; expected it with"
                " params 'device' and without keeps_fetched, which it includes"
            )
        if self.num_moved_states is not None and (self.num_moved_states < 1 or self.optimizer is Optimizer.DEVICE):
            raise PlanError(
                f"num_moved_states is {self.num_moved_states} with optimizer {self.optimizer.value!r}; expected at least 1,"
                " with an optimizer elsewhere than on the device only"
            )
        if self.other_states is not Optimizer.DEVICE and (
            self.num_moved_states is None or self.other_states is self.optimizer
        ):
            raise PlanError(
                f"other_states is {self.other_states.value!r} with optimizer {self.optimizer.value!r} and num_moved_states"
                f" {self.num_moved_states}; expected another place than the optimizer's, with num_moved_states given"
            )
        if self.num_offloaded is not None and (self.num_offloaded < 1 or self.activations is not Activations.OFFLOAD):
            raise PlanError(
                f"num_offloaded is {self.num_offloaded} with activations {self.activations.value!r}; expected at least 1,"
                " with activations 'offload' only"
            )
