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

Within a budget it also hands out the large blocks (`keep_freed`), so that the process takes no more than its tensors: glibc's
heap came to hold 6 to 27% more. A mapping for each tensor would keep the budget too, but has its pages zeroed each time.
"""

import functools
import gc
from ctypes import CDLL, addressof, c_int64
from pathlib import Path
from typing import Any

import torch

from autohete_fx.internals.modes import FakeTensor
from autohete_fx.runtime.tiers.host import is_home

_SOURCE = r"""
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLeastKept = 128 * 1024;

// Large blocks, each a mapping of its own. What tensors free stays resident for the next block of the same size, but never more
// than tensors have needed at once: then the pages that have been free for longest go back to the system.
class Pool {
 public:
  bool on = false;

  void* take(size_t num_bytes) {
    size_t size = rounded(num_bytes);
    size_t missing = size;
    void* data = MAP_FAILED;
    auto found = by_size_.find(size);
    if (found != by_size_.end()) {
      auto block = free_.find(found->second.back());
      found->second.pop_back();
      if (found->second.empty()) by_size_.erase(found);
      data = block->second.data;
      missing = size - block->second.resident;
      resident_free_ -= block->second.resident;
      free_.erase(block);
    }
    live_ += size;
    peak_ = std::max(peak_, live_);
    if (live_ + resident_free_ > peak_ && missing > 0) give_back(live_ + resident_free_ - peak_);
    if (data == MAP_FAILED) data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      live_ -= size;
      give_back(resident_free_);
      return nullptr;
    }
    return data;
  }

  void put(void* data, size_t num_bytes) {
    size_t size = rounded(num_bytes);
    live_ -= size;
    if (!on) {
      munmap(data, size);
      return;
    }
    free_[++age_] = {data, size, size};
    by_size_[size].push_back(age_);
    resident_free_ += size;
  }

  int64_t kept() const { return static_cast<int64_t>(resident_free_); }

  void start_over() {
    give_back(resident_free_);
    peak_ = live_;
  }

 private:
  struct Block {
    void* data;
    size_t size;
    size_t resident;  // at its beginning
  };

  static size_t rounded(size_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

  void give_back(size_t num_bytes) {
    while (num_bytes > 0 && !free_.empty()) {
      auto oldest = free_.begin();
      Block& block = oldest->second;
      size_t gone = std::min(rounded(num_bytes), block.resident);
      resident_free_ -= gone;
      num_bytes -= std::min(num_bytes, gone);
      block.resident -= gone;
      if (block.resident > 0) {
        madvise(static_cast<char*>(block.data) + block.resident, gone, MADV_DONTNEED);
        continue;
      }
      munmap(block.data, block.size);
      auto& ages = by_size_[block.size];
      ages.pop_front();
      if (ages.empty()) by_size_.erase(block.size);
      free_.erase(oldest);
    }
  }

  std::map<uint64_t, Block> free_;                     // by age
  std::map<size_t, std::deque<uint64_t>> by_size_;     // their ages, rising
  uint64_t age_ = 0;
  size_t live_ = 0, peak_ = 0, resident_free_ = 0;
};

struct Handed {
  size_t num_bytes;
  bool pooled;
};

// What was live over time, while it is on. A point stands for all changes within the resolution: the most and the last of them.
class History {
 public:
  void begin(int64_t resolution_ns) {
    points_.clear();
    resolution_ns_ = resolution_ns;
    on_ = true;
  }

  void end() { on_ = false; }

  void note(int64_t live) {
    if (!on_) return;
    int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::steady_clock::now().time_since_epoch()).count();
    if (points_.empty() || now - points_.back().at_ns >= resolution_ns_) {
      if (points_.size() >= kMostPoints) return;
      points_.push_back({now, live, live});
    }
    points_.back().most = std::max(points_.back().most, live);
    points_.back().last = live;
  }

  int64_t size() const { return static_cast<int64_t>(points_.size()); }

  void copy(int64_t* to) const {
    for (const Point& point : points_) {
      *to++ = point.at_ns;
      *to++ = point.most;
      *to++ = point.last;
    }
  }

 private:
  static constexpr size_t kMostPoints = 1 << 17;
  struct Point {
    int64_t at_ns, most, last;
  };
  std::vector<Point> points_;
  int64_t resolution_ns_ = 0;
  bool on_ = false;
};

struct State {
  std::mutex mutex;
  std::unordered_map<void*, Handed> sizes;
  int64_t live = 0;
  int64_t peak = 0;
  Pool pool;
  History history;
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
      Handed handed = found->second;
      state().live -= static_cast<int64_t>(handed.num_bytes);
      state().sizes.erase(found);
      state().history.note(state().live);
      if (handed.pooled) return state().pool.put(data, handed.num_bytes);
    }
  }
  state().inner->raw_deleter()(data);
}

void count(void* data, Handed handed) {
  state().sizes[data] = handed;
  state().live += static_cast<int64_t>(handed.num_bytes);
  state().peak = std::max(state().peak, state().live);
  state().history.note(state().live);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = nullptr;
    if (num_bytes >= kLeastKept) {
      std::lock_guard<std::mutex> guard(state().mutex);
      data = state().pool.on ? state().pool.take(num_bytes) : nullptr;
      if (data != nullptr) count(data, {num_bytes, true});
    }
    if (data == nullptr) {
      data = state().inner->allocate(num_bytes).release_context();
      std::lock_guard<std::mutex> guard(state().mutex);
      if (data != nullptr) count(data, {num_bytes, false});
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

// From now on large blocks come from the pool, which begins with what is in use of it.
extern "C" int64_t autohete_keep_freed() {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().pool.on = true;
  state().pool.start_over();
  return 1;
}

extern "C" int64_t autohete_kept() {
  std::lock_guard<std::mutex> guard(state().mutex);
  return state().pool.kept();
}

// 1 where the block is older than the counter; it is counted from now on, until autohete_remove.
extern "C" int64_t autohete_add_older(int64_t address, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(state().mutex);
  if (state().sizes.count(reinterpret_cast<void*>(address)) != 0) return 0;
  state().live += num_bytes;
  return 1;
}

extern "C" int64_t autohete_begin_history(int64_t resolution_ns) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().history.begin(resolution_ns);
  state().history.note(state().live);
  return 1;
}

extern "C" int64_t autohete_end_history() {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().history.end();
  return state().history.size();
}

extern "C" int64_t autohete_copy_history(int64_t address) {
  std::lock_guard<std::mutex> guard(state().mutex);
  state().history.copy(reinterpret_cast<int64_t*>(address));
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
    """From now on large blocks are mappings of their own, and what tensors free stays for the next of the same size, as far as
    tensors have needed as much at once since this was last called. Else glibc's heap keeps more, in pieces that fit no tensor."""
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
