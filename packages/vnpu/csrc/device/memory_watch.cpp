#include "device/memory_watch.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

namespace vnpu {
namespace {

constexpr int kPageBits = 12;    // 4 KiB: seldom shared by a weight and what lies beside it
constexpr int kChunkBits = 21;   // 2 MiB: a KV cache of gigabytes is looked through in a moment
constexpr int kBucketBits = 20;  // 1 MiB: few weights each, few buckets for a weight

// Zeros that take no memory until one is changed.
template <class T>
T* sparse_array(size_t count) {
  void* p = ::mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  ::madvise(p, count * sizeof(T), MADV_DONTDUMP);
  return static_cast<T*>(p);
}

template <class Visit>
void each_bucket(MemoryRange range, Visit visit) {
  for (uintptr_t b = range.begin >> kBucketBits; b <= (range.end - 1) >> kBucketBits; ++b) visit(b);
}

template <class T>
bool any(const std::atomic<T>* counts, uintptr_t first, uintptr_t last) {
  return std::any_of(counts + first, counts + last + 1, [](const std::atomic<T>& count) {
    return count.load(std::memory_order_relaxed) != 0;
  });
}

}  // namespace

MemoryWatch& MemoryWatch::instance() {
  // Never destroyed: memory is freed after static destructors have run.
  static MemoryWatch* const watch = new MemoryWatch();
  return *watch;
}

void MemoryWatch::cover(MemoryRange all) {
  begin_ = all.begin;
  end_ = all.end;
  pages_ = sparse_array<Count>(((end_ - begin_) >> kPageBits) + 1);
  chunks_ = sparse_array<std::atomic<uint32_t>>(((end_ - begin_) >> kChunkBits) + 1);
}

MemoryWatch::WatchedPtr MemoryWatch::watch(MemoryRange range, std::function<void()> on_change) {
  auto watched = std::make_shared<Watched>(range, std::move(on_change));
  {
    std::lock_guard lock(mutex_);
    each_bucket(range, [&](uintptr_t bucket) { buckets_[bucket].push_back(watched); });
    count(range, 1);
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return watched;
}

void MemoryWatch::release(const WatchedPtr& watched) {
  std::lock_guard lock(mutex_);
  if (watched->unchanged_.exchange(false)) erase(watched);
}

void MemoryWatch::erase(const WatchedPtr& watched) {
  count(watched->range_, -1);
  count_.fetch_sub(1, std::memory_order_relaxed);
  each_bucket(watched->range_, [&](uintptr_t bucket) {
    const auto found = buckets_.find(bucket);
    std::erase(found->second, watched);
    if (found->second.empty()) buckets_.erase(found);
  });
}

void MemoryWatch::count(MemoryRange range, int step) {
  const uintptr_t first = (range.begin - begin_) >> kPageBits;
  const uintptr_t last = (range.end - 1 - begin_) >> kPageBits;
  for (uintptr_t page = first; page <= last; ++page) {
    pages_[page].fetch_add(static_cast<uint16_t>(step), std::memory_order_relaxed);
    chunks_[page >> (kChunkBits - kPageBits)].fetch_add(static_cast<uint32_t>(step),
                                                        std::memory_order_relaxed);
  }
}

bool MemoryWatch::any_counted(MemoryRange range) const {
  if (range.begin < begin_ || range.end > end_ || range.begin >= range.end) return false;
  const uintptr_t begin = range.begin - begin_;
  const uintptr_t last = range.end - 1 - begin_;
  for (uintptr_t chunk = begin >> kChunkBits; chunk <= last >> kChunkBits; ++chunk) {
    if (chunks_[chunk].load(std::memory_order_relaxed) == 0) continue;
    const uintptr_t from = std::max(begin, chunk << kChunkBits);
    const uintptr_t to = std::min(last, ((chunk + 1) << kChunkBits) - 1);
    if (any(pages_, from >> kPageBits, to >> kPageBits)) return true;
  }
  return false;
}

std::vector<MemoryWatch::WatchedPtr> MemoryWatch::overlapping(MemoryRange range) const {
  std::vector<WatchedPtr> found;
  each_bucket(range, [&](uintptr_t bucket) {
    const auto there = buckets_.find(bucket);
    if (there == buckets_.end()) return;
    for (const WatchedPtr& watched : there->second) {
      if (watched->range_.begin < range.end && watched->range_.end > range.begin &&
          std::find(found.begin(), found.end(), watched) == found.end()) {
        found.push_back(watched);
      }
    }
  });
  return found;
}

bool MemoryWatch::watches(MemoryRange range) {
  std::lock_guard lock(mutex_);
  return any_counted(range) && !overlapping(range).empty();
}

void MemoryWatch::forget(MemoryRange range) {
  std::vector<WatchedPtr> found;
  {
    std::lock_guard lock(mutex_);
    found = overlapping(range);
    for (const WatchedPtr& watched : found) {
      watched->unchanged_.store(false, std::memory_order_release);
      erase(watched);
    }
  }
  for (const WatchedPtr& watched : found) watched->on_change_();
}

}  // namespace vnpu
