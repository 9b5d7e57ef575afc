#include "device/freed_memory.h"

#include <algorithm>

namespace vnpu {
namespace {

// Limit of the wait for tasks behind something slow, such as another rank.
constexpr std::chrono::milliseconds kPatience{1000};

}  // namespace

FreedMemory& FreedMemory::instance() {
  // Never destroyed: torch_npu frees memory after static destructors have run.
  static FreedMemory* const freed = new FreedMemory();
  return *freed;
}

void FreedMemory::free(Executor& executor, int device, void* address) {
  collect(executor);
  Memory& memory = Memory::instance();
  if (device < 0 || executor.drain_device(device, kPatience)) {
    memory.release(address);
    return;
  }
  // Later launches with this memory are refused, so the queues hold all tasks that may use it.
  Kept kept{memory.withdraw(address), executor.tails(device)};
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(kept));
  kept_count_ = kept_.size();
}

void FreedMemory::collect_kept(Executor& executor) {
  const std::lock_guard lock(mutex_);
  std::erase_if(kept_, [&](const Kept& kept) {
    if (!executor.have_passed(kept.tails)) return false;
    Memory::instance().reclaim(kept.allocation);
    return true;
  });
  kept_count_ = kept_.size();
}

}  // namespace vnpu
