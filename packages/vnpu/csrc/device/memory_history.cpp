// Describes an address for reports: the allocation that it is in, or was in before that was freed.

#include <mutex>
#include <shared_mutex>
#include <string>

#include "device/memory.h"

namespace vnpu {
namespace {

constexpr size_t kFreedHistory = 4096;  // freed allocations that reports can still name

}  // namespace

void Memory::remember_freed(const Allocation& allocation) {
  if (freed_order_.size() >= kFreedHistory) {
    freed_.erase(freed_order_.front());
    freed_order_.pop_front();
  }
  if (freed_.insert_or_assign(allocation.begin, allocation).second) {
    freed_order_.push_back(allocation.begin);
  }
}

std::string Memory::describe(const void* address) const {
  std::shared_lock lock(mutex_);
  return describe_locked(reinterpret_cast<uintptr_t>(address));
}

const Memory::Allocation* Memory::holder(const std::map<uintptr_t, Allocation>& in,
                                         uintptr_t address) {
  auto it = in.upper_bound(address);
  if (it == in.begin()) return nullptr;
  --it;
  return address < it->first + it->second.bytes ? &it->second : nullptr;
}

HostTouch Memory::look_up(const void* address) const {
  HostTouch touch;
  touch.is_device_memory = is_device_address(address);
  if (!touch.is_device_memory) return touch;
  const std::shared_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return touch;  // another thread changes the allocations
  const auto at = reinterpret_cast<uintptr_t>(address);
  const Allocation* found = holder(live_, at);
  touch.state = "live";
  if (found == nullptr) {
    found = holder(freed_, at);
    touch.state = "freed (use after free)";
  }
  if (found == nullptr) return {.is_device_memory = true};
  touch.begin = found->begin;
  touch.bytes = found->bytes;
  touch.number = found->number;
  touch.device = found->device;
  return touch;
}

std::string Memory::describe_locked(uintptr_t address) const {
  const auto text = [&](const Allocation& a, const char* state) {
    return "byte " + std::to_string(address - a.begin) + " of allocation #" +
           std::to_string(a.number) + " on device " + std::to_string(a.device) + " (" +
           std::to_string(a.bytes) + " bytes), " + state;
  };
  if (const Allocation* a = holder(live_, address)) return text(*a, "live");
  if (const Allocation* a = holder(freed_, address)) return text(*a, "freed (use after free)");
  if (address == 0) return "a null address";
  if (address >= begin_ && address < end_) return "device memory that was never allocated";
  return "host memory";
}

}  // namespace vnpu
