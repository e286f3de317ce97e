"""Counts what PyTorch's CPU allocator has handed out, so that a CPU device has a ``memory_allocated`` as CUDA has.

In: nothing. Out: live and peak bytes of tensor storages, exact to the byte, over all threads. Why not the profiler's memory
events: they leave out the release of blocks older than the profile, and other threads (PyTorch 2.11 and 2.13). A step that
frees the last step's gradients would measure wrong, and each step would cost a profile. This is an allocator in front of
PyTorch's own that adds and subtracts.

Inductor's C++ cache compiles it on first use, some seconds once per machine. It then stays for the process: blocks that it
handed out come back to it. Tensors that are older are found by a walk over Python's objects and subtracted when they die. Not
counted: tensors that at that time only C++ knows (values saved by a graph whose backward is still to come). Nor is memory of
others that tensors borrow later (NumPy, mapped files, homes), or scratch memory that kernels allocate past PyTorch's allocator.

Within a budget it also hands out the large blocks (`keep_freed`), so that the process takes no more than its tensors. By
measurement, glibc's heap holds 6 to 27% more. A mapping for each tensor would keep the budget too, but has its pages zeroed
each time.
"""

import functools
import gc
from ctypes import CDLL, addressof, c_int64
from pathlib import Path
from typing import Any

import torch

from autohete_fx.internals.modes import DisableTorchFunction, FakeTensor
from autohete_fx.runtime.tiers.host import is_home

_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "autohete_install": (),
    "autohete_live": (),
    "autohete_peak": (),
    "autohete_reset_peak": (),
    "autohete_keep_freed": (),
    "autohete_kept": (),
    "autohete_add_older": (c_int64, c_int64),
    "autohete_remove": (c_int64,),
    "autohete_begin_history": (c_int64,),
    "autohete_end_history": (),
    "autohete_copy_history": (c_int64,),
}
_OLDER = "_autohete_older"


def is_running() -> bool:
    """Whether allocations are being counted; the other functions start that."""
    return _counter.cache_info().currsize > 0


def live_bytes() -> int:
    """Bytes of all CPU tensor storages, homes excluded."""
    return _counter().autohete_live()


def peak_bytes() -> int:
    """The most that ``live_bytes`` has been since ``reset_peak``."""
    return _counter().autohete_peak()


def reset_peak() -> None:
    """Start the peak over from what is live now."""
    _counter().autohete_reset_peak()


def begin_history(resolution_s: float) -> None:
    """From now on note what is live over time, the most and the last within each ``resolution_s``. There is one history a process:
    an earlier one is forgotten."""
    _counter().autohete_begin_history(int(resolution_s * 1e9))


def end_history() -> list[tuple[float, int, int]]:
    """Stop noting. For each time at which something changed, a reading of ``time.perf_counter``, the most that was live from
    then on for the resolution, and the last."""
    count = _counter().autohete_end_history()
    figures = (c_int64 * (3 * count))()
    _counter().autohete_copy_history(addressof(figures))
    return [(figures[i] / 1e9, figures[i + 1], figures[i + 2]) for i in range(0, 3 * count, 3)]


def keep_freed() -> None:
    """From now on large blocks are mappings of their own.

    Memory that tensors free stays for the next of the same size. It is kept as far as tensors have needed as much at once since
    the last call. Else glibc's heap keeps more, in pieces that fit no tensor.
    """
    _counter().autohete_keep_freed()
    give_back()


def kept_bytes() -> int:
    """Bytes that no tensor has and that stay resident for the next."""
    return _counter().autohete_kept()


def give_back() -> None:
    """The free pages of glibc's heap go to the system; nothing where another library allocates."""
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _OlderStorage:
    """Hangs on a storage that is older than the counter, and subtracts it when it dies."""

    __slots__ = ("_num_bytes", "_remove")

    def __init__(self, remove: Any, num_bytes: int) -> None:
        self._remove = remove
        self._num_bytes = num_bytes

    def __del__(self) -> None:
        self._remove(self._num_bytes)


@functools.cache
def _counter() -> CDLL:
    """The library, compiled, installed and aware of the tensors that exist. One per process, as is the allocator."""
    from autohete_fx.internals.inductor import CppCodeCache

    directory = Path(torch.__file__).parent / "lib"
    library = CppCodeCache.load(_SOURCE.read_text(), extra_flags=(f"-L{directory}", "-Wl,--no-as-needed", "-lc10"))
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).restype = c_int64
        getattr(library, name).argtypes = arguments
    if not library.autohete_install():
        raise RuntimeError(
            "CPU memory cannot be measured: another extension has installed a CPU allocator whose blocks cannot be "
            "freed by address; do without it while measuring"
        )
    for address, storage in _storages_in_python().items():
        if library.autohete_add_older(address, storage.nbytes()):
            setattr(storage, _OLDER, _OlderStorage(library.autohete_remove, storage.nbytes()))
    library.autohete_reset_peak()
    return library


def _storages_in_python() -> dict[int, torch.UntypedStorage]:
    """By address, the storages of the CPU tensors that Python's collector knows and of their gradients; no homes."""
    found: dict[int, torch.UntypedStorage] = {}
    for each in gc.get_objects():
        # Not isinstance: that asks `__class__`, which lazy proxies answer by importing something.
        if not issubclass(type(each), torch.Tensor) or issubclass(type(each), FakeTensor):
            continue
        with DisableTorchFunction():  # subclasses may refuse even to be asked
            for t in (each, each.grad if each.is_leaf else None):
                if t is None or t.device.type != "cpu" or t.layout is not torch.strided:
                    continue
                try:
                    storage = t.untyped_storage()
                    address = storage.data_ptr()
                except RuntimeError:
                    continue  # a wrapper (functorch, functionalisation, subclasses): the tensor inside has the bytes
                if address and storage.device.type == "cpu" and not is_home(t):
                    found[address] = storage
    return found
