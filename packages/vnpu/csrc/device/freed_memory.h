#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "device/executor.h"
#include "device/memory.h"

namespace vnpu {

// Frees device memory. Tasks that were launched before may still use it: they run first, so that a
// program's results do not depend on when it frees. If they wait for something that does not come,
// such as a rank that hangs, the program continues and the address range is kept until they have
// ended.
class FreedMemory {
 public:
  static FreedMemory& instance();

  // device: whose queues may hold such tasks; -1: none. Throws for an address that no allocation
  // starts at.
  void free(Executor& executor, int device, void* address);
  // Frees address ranges that no task can use any more.
  void collect(Executor& executor) {
    if (kept_count_.load(std::memory_order_relaxed) != 0) collect_kept(executor);
  }

 private:
  struct Kept {
    Memory::Allocation allocation;
    Executor::Tails tails;
  };
  void collect_kept(Executor& executor);

  std::mutex mutex_;
  std::vector<Kept> kept_;
  std::atomic<size_t> kept_count_{0};
};

}  // namespace vnpu
