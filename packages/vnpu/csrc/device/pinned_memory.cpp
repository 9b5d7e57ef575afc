#include "device/pinned_memory.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "device/checked_sizes.h"
#include "device/failure.h"

namespace vnpu {

PinnedMemory& PinnedMemory::instance() {
  // Never destroyed: torch_npu frees memory after static destructors have run.
  static PinnedMemory* const pinned = new PinnedMemory();
  return *pinned;
}

void PinnedMemory::add(const void* begin, size_t bytes, bool owned, bool is_mapped) {
  checked_add(reinterpret_cast<uintptr_t>(begin), bytes, "the end of pinned memory");
  std::lock_guard lock(mutex_);
  Range& range = ranges_[reinterpret_cast<uintptr_t>(begin)];
  range.of(owned) = bytes;
  if (!owned) range.is_mapped = is_mapped;
}

size_t PinnedMemory::bytes(const void* begin, bool owned, const char* function) const {
  std::lock_guard lock(mutex_);
  const auto it = ranges_.find(reinterpret_cast<uintptr_t>(begin));
  if (it == ranges_.end() || it->second.of(owned) == 0) {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: ") + function + " of an address that is not pinned memory.");
  }
  return it->second.of(owned);
}

void PinnedMemory::remove(const void* begin, bool owned) {
  std::lock_guard lock(mutex_);
  const auto it = ranges_.find(reinterpret_cast<uintptr_t>(begin));
  if (it == ranges_.end()) return;
  it->second.of(owned) = 0;
  if (!owned) it->second.is_mapped = false;
  if (it->second.of(!owned) == 0) ranges_.erase(it);
}

bool PinnedMemory::lies_in_one(const void* address, size_t bytes,
                               size_t (*length)(const Range&)) const {
  std::lock_guard lock(mutex_);
  const auto a = reinterpret_cast<uintptr_t>(address);
  auto it = ranges_.upper_bound(a);
  if (it == ranges_.begin()) return false;
  --it;
  const size_t most = length(it->second);
  return most > 0 && lies_within(a, bytes, it->first, most);
}

bool PinnedMemory::contains(const void* address, size_t bytes) const {
  return lies_in_one(address, bytes, [](const Range& range) {
    return std::max(range.allocated, range.registered);
  });
}

bool PinnedMemory::is_mapped(const void* address, size_t bytes) const {
  return lies_in_one(address, bytes,
                     [](const Range& range) { return range.is_mapped ? range.registered : 0; });
}

}  // namespace vnpu
