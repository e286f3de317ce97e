"""Counts what PyTorch's CPU allocator has handed out, so that a CPU device has a ``memory_allocated`` as CUDA has.

In: nothing. Out: live and peak bytes of tensor storages, exact to the byte, over all threads. Why not the profiler's
memory events: they leave out the release of every block that is older than the profile and whatever another thread
does (PyTorch 2.11 and 2.13), so a step that frees the last step's gradients would measure wrong; and they cost a
profile per step. This is an allocator in front of PyTorch's own that adds and subtracts.

It is compiled by Inductor's C++ cache on first use (some seconds once per machine) and then stays for the process:
blocks that it handed out come back to it. Tensors that are older are found by a walk over Python's objects and
subtracted when they die. Not counted: tensors that at that time only C++ knows (values saved by a graph whose backward
is still to come), memory of others that tensors borrow later (NumPy, mapped files, homes), and scratch
memory that kernels allocate past PyTorch's allocator.
"""

import functools
import gc
from ctypes import CDLL, c_int64
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autohete_fx.runtime.tiers import is_home

_SOURCE = r"""
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

struct State {
  std::mutex mutex;
  std::unordered_map<void*, size_t> sizes;
  int64_t live = 0;
  int64_t peak = 0;
  c10::Allocator* inner = nullptr;
};

// Never destroyed: tensors may be freed after static destructors have run.
State& state() {
  static State* instance = new State;
  return *instance;
}

void release(void* data) {
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    auto found = state().sizes.find(data);
    if (found != state().sizes.end()) {
      state().live -= static_cast<int64_t>(found->second);
      state().sizes.erase(found);
    }
  }
  state().inner->raw_deleter()(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = state().inner->allocate(num_bytes).release_context();
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(state().mutex);
      state().sizes[data] = num_bytes;
      state().live += static_cast<int64_t>(num_bytes);
      state().peak = std::max(state().peak, state().live);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

extern "C" int64_t autohete_install() {
  if (state().inner != nullptr) return 1;
  c10::Allocator* inner = c10::GetCPUAllocator();
  // Only an allocator whose blocks are freed by their address alone can be put behind this one.
  if (inner->raw_deleter() == nullptr) return 0;
  state().inner = inner;
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
  c10::SetCPUAllocator(new CountingAllocator, /*priority=*/255);
  return 1;
}

extern "C" int64_t autohete_live() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().live;
}

extern "C" int64_t autohete_peak() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().peak;
}

extern "C" int64_t autohete_reset_peak() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().peak = state().live;
}

// 1 where the block is older than the counter; it is counted from now on, until autohete_remove.
extern "C" int64_t autohete_add_older(int64_t address, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(state().mutex);
  if (state().sizes.count(reinterpret_cast<void*>(address)) != 0) return 0;
  state().live += num_bytes;
  return 1;
}

extern "C" int64_t autohete_remove(int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().live -= num_bytes;
}
"""

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "autohete_install": (),
    "autohete_live": (),
    "autohete_peak": (),
    "autohete_reset_peak": (),
    "autohete_add_older": (c_int64, c_int64),
    "autohete_remove": (c_int64,),
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
    from torch._inductor.codecache import CppCodeCache

    directory = Path(torch.__file__).parent / "lib"
    library = CppCodeCache.load(_SOURCE, extra_flags=(f"-L{directory}", "-Wl,--no-as-needed", "-lc10"))
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
        for t in (each, each.grad if each.is_leaf else None):
            if t is None or t.device.type != "cpu" or t.layout is not torch.strided:
                continue
            try:
                storage = t.untyped_storage()
                address = storage.data_ptr()
            except (NotImplementedError, RuntimeError):
                continue  # a wrapper (functorch, functionalisation, subclasses): the tensor inside has the bytes
            if address and storage.device.type == "cpu" and not is_home(t):
                found[address] = storage
    return found
