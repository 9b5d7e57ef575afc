#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "device/checked_sizes.h"
#include "device/configuration.h"
#include "device/failure.h"
#include "device/faults.h"
#include "device/memory.h"
#include "device/memory_watch.h"
#include "device/shared_file.h"

// Address ranges that programs reserve, and physical memory that they map there and share.

namespace vnpu {
Memory::Physical::Physical(uint64_t identity, int file, size_t bytes, int device, bool owner)
    : identity(identity), file(file), bytes(bytes), device(device), owner(owner), shared(!owner) {}

// Nothing is thrown: the memory that made this exists.
Memory::Physical::~Physical() {  // NOLINT(bugprone-exception-escape)
  ::close(file);
  if (!owner) return;
  Memory& memory = Memory::instance();
  std::unique_lock lock(memory.mutex_);
  memory.devices_[static_cast<size_t>(device)].used -= bytes;
}

void* Memory::reserve(size_t bytes, void*) {
  std::unique_lock lock(mutex_);
  const size_t rounded = bytes <= kReservable ? round_up(bytes, kPage) : bytes;
  void* address =
      bytes <= kReservable ? reserved_gaps_.carve(reservable_begin_, rounded, kPage) : nullptr;
  if (address == nullptr) {
    throw Failure(FailureKind::kOutOfMemory, "vnpu: no address range of " + std::to_string(bytes) +
                                                 " bytes is left to reserve.");
  }
  reserved_[reinterpret_cast<uintptr_t>(address)] = rounded;
  return address;
}

void Memory::unreserve(void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::unique_lock lock(mutex_);
  const auto it = reserved_.find(begin);
  if (it == reserved_.end()) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: aclrtReleaseMemAddress of an address that was not reserved.");
  }
  const auto inside = mapped_.lower_bound(begin);
  if (inside != mapped_.end() && inside->first < begin + it->second) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: aclrtReleaseMemAddress of a range that still has memory mapped into it; "
                  "call aclrtUnmapMem first.");
  }
  reserved_gaps_.give_back(begin, it->second);
  reserved_.erase(it);
}

std::shared_ptr<Memory::Physical> Memory::create_physical(int device_index, size_t bytes) {
  if (bytes == 0 || bytes % kPage != 0) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: physical memory comes in multiples of " +
                                                     std::to_string(kPage) + " bytes; asked for " +
                                                     std::to_string(bytes) + ".");
  }
  faults::reach(faults::Kind::kPhysical);
  const uint64_t identity = shared_file::new_identity();
  shared_file::FileDescriptor file = shared_file::make(identity, bytes);
  auto physical = std::make_shared<Physical>(identity, file.number, bytes, device_index, false);
  file.release();
  std::unique_lock lock(mutex_);
  Device& device = devices_.at(static_cast<size_t>(device_index));
  const size_t total = round_up(Configuration::instance().memory_bytes, kPage);
  if (bytes > total - device.used) {
    throw Failure(FailureKind::kOutOfMemory,
                  "vnpu: device " + std::to_string(device_index) + " is out of memory: " +
                      std::to_string(bytes) + " bytes of physical memory asked for, " +
                      std::to_string(total - device.used) + " bytes free.");
  }
  device.used += bytes;
  physical->owner = true;
  physical->shared = false;
  return physical;
}

std::shared_ptr<Memory::Physical> Memory::import_physical(uint64_t identity, int device) {
  shared_file::FileDescriptor file = shared_file::open(identity, "the exported memory");
  struct stat info = {};
  if (::fstat(file.number, &info) != 0 || info.st_size <= 0 ||
      static_cast<size_t>(info.st_size) % kPage != 0) {
    throw Failure(FailureKind::kInvalidHandle, "vnpu: the exported memory has " +
                                                   std::to_string(info.st_size) +
                                                   " bytes, which is no size of such memory.");
  }
  auto physical = std::make_shared<Physical>(identity, file.number,
                                             static_cast<size_t>(info.st_size), device, false);
  file.release();
  return physical;
}

void Memory::map(void* address, size_t bytes, size_t offset,
                 const std::shared_ptr<Physical>& physical) {
  faults::reach(faults::Kind::kMap);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::unique_lock lock(mutex_);
  const auto after = reserved_.upper_bound(begin);
  const bool inside = after != reserved_.begin() &&
                      lies_within(begin, bytes, std::prev(after)->first, std::prev(after)->second);
  const auto next = mapped_.lower_bound(begin);
  const bool overlaps =
      (next != mapped_.end() && next->first < begin + bytes) ||
      (next != mapped_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin);
  if (!inside || overlaps || !lies_within(offset, bytes, 0, physical->bytes)) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: aclrtMapMem needs a reserved range without a mapping, within the physical "
                  "memory: " +
                      describe_locked(begin) + ".");
  }
  void* target = reinterpret_cast<void*>(begin + distance_);
  if (::mmap(target, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file,
             static_cast<off_t>(offset)) == MAP_FAILED) {
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: mmap failed: ") + std::strerror(errno));
  }
  if (std::any_of(mapped_.begin(), mapped_.end(),
                  [&](const auto& entry) { return entry.second.physical == physical; })) {
    physical->shared = true;
    tell_changed(*physical);
  }
  mapped_[begin] = Mapping{bytes, physical};
  live_[begin] = Allocation{begin, bytes, physical->device, ++allocations_};
}

void Memory::share(Physical& physical) {
  std::unique_lock lock(mutex_);
  physical.shared = true;
  tell_changed(physical);
}

void Memory::tell_changed(const Physical& physical) const {
  for (const auto& [begin, mapping] : mapped_) {
    if (mapping.physical.get() != &physical) continue;
    MemoryWatch::instance().changed({begin, begin + mapping.bytes});
  }
}

void Memory::map_private(uintptr_t backing, size_t bytes) {
  if (::mmap(reinterpret_cast<void*>(backing), bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: munmap failed: ") + std::strerror(errno));
  }
}

void Memory::unmap(void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::shared_ptr<Physical> last_owner;  // its destructor takes the lock
  std::unique_lock lock(mutex_);
  const auto it = mapped_.find(begin);
  if (it == mapped_.end()) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: aclrtUnmapMem of an address that nothing is mapped at: " +
                      describe_locked(begin) + ".");
  }
  map_private(begin + distance_, it->second.bytes);
  const size_t bytes = it->second.bytes;
  last_owner = std::move(it->second.physical);
  mapped_.erase(it);
  remember_freed(live_[begin]);
  live_.erase(begin);
  live_generation_.fetch_add(1, std::memory_order_release);
  lock.unlock();
  MemoryWatch::instance().changed({begin, begin + bytes});
}

}  // namespace vnpu
