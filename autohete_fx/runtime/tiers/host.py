"""Host memory that presents itself on the compute device: where offloaded tensors have their homes.

In: sizes, strides, dtypes. Out: ordinary tensors on the compute device whose bytes lie in the tier below it. That tier is a
memory-mapped file for a CPU device, and pinned RAM mapped into CUDA for a CUDA device. Why: eager code, autograd and optimizers
read and write such a tensor as any other, so placement changes speed and never meaning.

A home belongs to whoever references its storage, in Python or only in C++: ``.grad``, a tensor that autograd saved, a
view. It returns to the pool with the last reference, so a gradient that is still ``.grad`` is never overwritten.
"""

import abc
import contextlib
import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from autohete_fx.errors import HostMemoryError
from autohete_fx.graph.ops import copied_strides
from autohete_fx.internals.modes import DisableTorchFunction, disable_current_modes, has_dispatch_modes
from autohete_fx.internals.tensors import storage_at
from autohete_fx.runtime.tiers.arena import ALIGNMENT_BYTES, Arena
from autohete_fx.runtime.tiers.mapped_files import MakeChunk, check_directory, map_file, without_file
from autohete_fx.runtime.tiers.pinned import cuda_register, cuda_unregister, pin

_LEASE = "_autohete_lease"
"""The attribute of a home's storage that holds its lease. PyTorch keeps a storage's Python object, attributes included,
as long as the C++ storage lives, so this is the reference that counts."""

_FILE_GROWTH_BYTES = 16 * 2**20
_PINNED_GROWTH_BYTES = 256 * 2**20


class HostTier(abc.ABC):
    """Homes for the tensors of one compute device. Thread safe; all sizes are bytes.

    Attributes:
        device: what the homes present themselves on.
    """

    def __init__(self, device: torch.device, arena: Arena) -> None:
        self.device = device
        self._arena = arena

    @abc.abstractmethod
    def _storage(self, lease: "ctypes.Array[ctypes.c_char]") -> torch.UntypedStorage:
        """A storage on ``device`` over the lease's bytes."""

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised home of the given layout.

        Raises HostMemoryError where the tier's capacity or the system refuses.
        """
        lease = self._arena.lease(span(size, stride) * dtype.itemsize)
        # Homes may be asked for in the middle of tracing or of inference, and outlive it as ordinary tensors.
        with without_modes(), torch.inference_mode(False):
            storage = self._storage(lease)
            setattr(storage, _LEASE, lease)
            return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, tuple(size), tuple(stride))

    def empty_like(self, t: torch.Tensor) -> torch.Tensor:
        """An uninitialised home with the size and dtype of ``t``, and its strides, or without gaps their order."""
        return self.empty_strided(t.shape, copied_strides(t), t.dtype)

    def host_view(self, t: torch.Tensor) -> torch.Tensor:
        """A CPU tensor over the bytes of ``t``, which must be a home of this tier; it keeps the home in use."""
        assert self.owns(t), "host_view of a tensor that is no home of this tier"
        return host_view(t)

    def owns(self, t: torch.Tensor) -> bool:
        """Whether the storage of ``t`` (a real tensor, on the device or a host view) is a home of this tier."""
        return is_home(t) and self._arena.chunk_at(t.untyped_storage().data_ptr()) is not None

    @property
    def in_use_bytes(self) -> int:
        """Bytes of all homes that something references, each rounded up to the arena's alignment."""
        return self._arena.in_use_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system: homes in use and homes that wait for reuse."""
        return self._arena.reserved_bytes

    @property
    def waited_s(self) -> float:
        """Seconds for which those who asked for homes were held until the device was done with what these had held before."""
        return self._arena.waited_s

    @property
    def mapped_s(self) -> float:
        """Seconds that it took to take memory from the system, and to pin it."""
        return self._arena.mapped_s

    def reserve(self, num_bytes: int) -> None:
        """Take memory from the system now, so that homes up to that total are handed out without a system call.

        Raises HostMemoryError that says how much could be had.
        """
        self._arena.reserve(num_bytes)

    def trim(self) -> None:
        """Give chunks without a home in use back to the system."""
        self._arena.trim()

    def close(self) -> None:
        """Refuse new homes and give free memory back. Homes in use stay valid and go with their last reference."""
        self._arena.close()


class MappedFileTier(HostTier):
    """Homes of a CPU device, in unnamed files of ``offload_dir`` (default: where the system has temporary files).

    Args:
        make_chunk, alignment_bytes: of the arena.
    """

    def __init__(
        self,
        offload_dir: str | None = None,
        capacity_bytes: int | None = None,
        *,
        make_chunk: MakeChunk = without_file,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        directory = check_directory(offload_dir)
        arena = Arena(
            lambda num_bytes: map_file(num_bytes, directory, make_chunk),
            growth_bytes=_FILE_GROWTH_BYTES,
            capacity_bytes=capacity_bytes,
            alignment_bytes=alignment_bytes,
        )
        super().__init__(torch.device("cpu"), arena)

    def _storage(self, lease: "ctypes.Array[ctypes.c_char]") -> torch.UntypedStorage:
        return torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()


class _Events:
    """An event on each of some streams, as one `arena.Fence`."""

    def __init__(self, device: torch.device, streams: Iterable[torch.Stream]) -> None:
        self._events: list[torch.Event] = []
        for stream in dict.fromkeys(streams):
            self._events.append(torch.Event(device))
            self._events[-1].record(stream)

    def query(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


class _Streams:
    """The streams on which homes of a device were asked for. The arena knows it instead of the tier: two that know each other are
    freed by a garbage collection alone, and pinned memory of the size of a model would wait for that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[torch.Stream] = set()

    def note_current(self) -> None:
        """A home is asked for now."""
        self._seen.add(torch.accelerator.current_stream(self._device))

    def fence(self) -> _Events:
        """A point that is after all that was given to the streams so far."""
        return _Events(self._device, (torch.accelerator.current_stream(self._device), *self._seen))


class PinnedTier(HostTier):
    """Homes of a CUDA device, in pinned RAM that its kernels address directly.

    Reuse: a kernel may still be at work on a home when Python lets go of its last reference. A home is therefore handed out
    again only after an event has passed on each stream that was ever current where homes were asked for. The optimizer's thread
    asks on a stream that knows nothing of the one on which the user trains. That covers work on those streams and copies that
    they have waited for (a ticket keeps what it copies referenced until then). Homes that another stream uses must be kept
    referenced until that stream is waited for.

    Unlike elsewhere in CUDA, the storage of a home is no allocation of PyTorch: ``memory_allocated`` does not count it,
    and ``record_stream`` on it does nothing.
    """

    def __init__(self, device: torch.device, capacity_bytes: int | None = None, arena: Arena | None = None) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._streams = _Streams(device)
        chunk = functools.partial(
            pin,
            register=functools.partial(cuda_register, device=device),
            unregister=functools.partial(cuda_unregister, device=device),
        )
        super().__init__(
            device,
            arena
            or Arena(
                chunk, growth_bytes=_PINNED_GROWTH_BYTES, capacity_bytes=capacity_bytes, fence=self._streams.fence
            ),
        )

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.device.type != "cpu":
            self._streams.note_current()
        return super().empty_strided(size, stride, dtype)

    def _storage(self, lease: "ctypes.Array[ctypes.c_char]") -> torch.UntypedStorage:
        # This storage has no deleter; the lease that the caller hangs on it is what keeps the bytes.
        storage = storage_at(ctypes.addressof(lease), self.device, len(lease))
        return cast(torch.UntypedStorage, storage)  # PyTorch's stub names the C++ type


def open_tier(
    device: torch.device | str, offload_dir: str | None = None, capacity_bytes: int | None = None
) -> HostTier:
    """The tier below a device: memory-mapped files for a CPU device, pinned RAM for a CUDA device.

    Args:
        device: the compute device.
        offload_dir: CPU only: where the files are. On tmpfs the homes are RAM.
        capacity_bytes: the most that may be reserved; None for no limit.

    Raises HostMemoryError for an ``offload_dir`` that cannot be used or a device without such a tier.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return MappedFileTier(offload_dir, capacity_bytes)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise HostMemoryError(f"device {str(device)!r} was given, but PyTorch finds no CUDA device; expected cpu")
        return PinnedTier(device, capacity_bytes)
    raise HostMemoryError(f"there is no host tier for device {str(device)!r}; expected cpu or cuda")


def is_home(t: torch.Tensor) -> bool:
    """Whether the storage of ``t`` (a real tensor) is a home of any tier."""
    storage = t.untyped_storage()
    lease = getattr(storage, _LEASE, None)
    # `share_memory_` puts other bytes under the same storage object.
    return lease is not None and ctypes.addressof(lease) == storage.data_ptr()


def lease_of(t: torch.Tensor) -> "ctypes.Array[ctypes.c_char] | None":
    """The lease of a home; None for any other tensor."""
    with DisableTorchFunction():  # asked in between, it is no use of the tensor
        return getattr(t.untyped_storage(), _LEASE, None) if is_home(t) else None


def host_view(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of a home: ``t`` itself where it is on the CPU. It keeps the home in use."""
    if t.device.type == "cpu":
        return t
    return lease_view(t)


def lease_view(t: torch.Tensor) -> torch.Tensor:
    """A new CPU storage over a home's lease, with the layout of ``t``."""
    lease = getattr(t.untyped_storage(), _LEASE)
    with without_modes(), torch.inference_mode(False):
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        setattr(storage, _LEASE, lease)
        return torch.empty(0, dtype=t.dtype, device="cpu").set_(storage, t.storage_offset(), t.shape, t.stride())


def without_modes() -> contextlib.AbstractContextManager[object]:
    """No modes inside. In training there are none, and to look for them takes longer than all else here."""
    return disable_current_modes() if has_dispatch_modes() else contextlib.nullcontext()


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a layout; 0 where it has none."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
