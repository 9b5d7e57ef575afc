#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "device/touched.h"

namespace vnpu {

// Reports changes of device memory to holders of data that was computed from it (a weight in a
// library's own layout). Every task reports its writes when it ends; freed memory counts as changed
// too. A write to unwatched memory costs a few loads: watches are counted per page and per chunk of
// pages.
class MemoryWatch {
 public:
  // One watched range. It ends with the first change, or with release().
  class Watched {
   public:
    Watched(MemoryRange range, std::function<void()> on_change)
        : range_(range), on_change_(std::move(on_change)) {}
    bool is_unchanged() const { return unchanged_.load(std::memory_order_acquire); }

   private:
    friend class MemoryWatch;
    const MemoryRange range_;
    const std::function<void()> on_change_;
    std::atomic<bool> unchanged_{true};
  };
  using WatchedPtr = std::shared_ptr<Watched>;

  static MemoryWatch& instance();

  // All addresses of device memory, once, before anything is watched.
  void cover(MemoryRange all);

  // Watches device memory that only this process writes. `on_change` runs once at most, in the
  // thread that changed the memory, after the change. What the caller reads after watch() returns
  // is the memory's content while is_unchanged() is true, unless unordered work changes it at the
  // same time.
  WatchedPtr watch(MemoryRange range, std::function<void()> on_change);
  // True if any watched range has a byte in this one.
  bool watches(MemoryRange range);
  // Ends a watch without a change.
  void release(const WatchedPtr& watched);
  // Device memory was written or given back; any other address is ignored.
  void changed(MemoryRange range) {
    // Orders the caller's writes before its reads of the counts, as watch() orders counting before
    // the reads that follow: one of the two sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (count_.load(std::memory_order_relaxed) != 0 && any_counted(range)) forget(range);
  }

 private:
  using Count = std::atomic<uint16_t>;

  MemoryWatch() = default;
  bool any_counted(MemoryRange range) const;
  std::vector<WatchedPtr> overlapping(MemoryRange range) const;
  void forget(MemoryRange range);
  void count(MemoryRange range, int step);
  void erase(const WatchedPtr& watched);

  uintptr_t begin_ = 0;
  uintptr_t end_ = 0;
  Count* pages_ = nullptr;                   // of the whole range of device addresses
  std::atomic<uint32_t>* chunks_ = nullptr;  // sums of their pages' counts
  std::atomic<size_t> count_{0};
  std::mutex mutex_;
  std::unordered_map<uintptr_t, std::vector<WatchedPtr>> buckets_;  // ranges, by part of memory
};

}  // namespace vnpu
