// An allocator in front of PyTorch's own: it counts the bytes that tensors have, and hands out large blocks within a budget.
// `cpu_counter.py` compiles it and says why.

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
// Readable after each block, and never resident: Inductor's kernels may load a whole vector at a tensor's end (PyTorch 2.13).
constexpr size_t kReadable = kPage;

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
    if (data == MAP_FAILED) data = mmap(nullptr, size + kReadable, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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
      munmap(data, size + kReadable);
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
      munmap(block.data, block.size + kReadable);
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
