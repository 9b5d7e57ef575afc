#include "device/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "device/checked_sizes.h"
#include "device/configuration.h"
#include "device/failure.h"
#include "device/faults.h"
#include "device/host_touch.h"
#include "device/memory_watch.h"
#include "device/pinned_memory.h"

namespace vnpu {
namespace {

constexpr size_t kDropThreshold = size_t{1} << 20;  // zeroing more than this drops pages instead
// A chip's driver maps pages, so that free memory is never too scattered for an allocation: there
// are more addresses than bytes.
constexpr size_t kAddressesPerByte = 2;

void* reserve_range(size_t bytes, int protection) {
  void* p = ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw Failure(FailureKind::kOutOfMemory,
                  "vnpu: cannot reserve " + std::to_string(bytes >> 30) +
                      " GiB of address space: " + std::strerror(errno) +
                      ". Lift the address space limit (ulimit -v unlimited), allow overcommit "
                      "(vm.overcommit_memory 0 or 1), or lower VNPU_DEVICES or VNPU_MEMORY.");
  }
  ::madvise(p, bytes, MADV_DONTDUMP);
  return p;
}

// Allocations of a page or more have pages of their own, which other processes can import.
size_t room_of(size_t bytes) {
  return bytes < Memory::kOsPage ? bytes : round_up(bytes, Memory::kOsPage);
}

// The last range that was found live: most launches hit the same few allocations.
struct LastRange {
  uint64_t generation = ~uint64_t{0};
  uintptr_t begin = 0;
  uintptr_t end = 0;
};
thread_local LastRange last_range;

}  // namespace

Memory& Memory::instance() {
  // Never destroyed: torch_npu frees memory after static destructors have run.
  static Memory* const memory = new Memory();
  return *memory;
}

Memory::Memory() {
  const Configuration& configuration = Configuration::instance();
  const size_t per_device = kAddressesPerByte * round_up(configuration.memory_bytes, kPage);
  const size_t total = per_device * configuration.device_count + kReservable;
  begin_ = reinterpret_cast<uintptr_t>(reserve_range(total, PROT_NONE));
  end_ = begin_ + total;
  MemoryWatch::instance().cover({begin_, end_});
  const auto backing = reinterpret_cast<uintptr_t>(reserve_range(total, PROT_READ | PROT_WRITE));
  distance_ = backing - begin_;
  devices_.resize(configuration.device_count);
  uintptr_t at = begin_;
  for (Device& device : devices_) {
    device.begin = device.next = at;
    device.gaps.give_back(at, per_device);
    at += per_device;
  }
  reservable_begin_ = at;
  reserved_gaps_.give_back(at, kReservable);

  report_host_touches([](const void* address) { return instance().look_up(address); });
}

void* Memory::allocate(int device_index, size_t bytes) {
  if (bytes == 0) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: an allocation of 0 bytes was asked for.");
  }
  faults::reach(faults::Kind::kAlloc);
  std::unique_lock lock(mutex_);
  Device& device = devices_.at(static_cast<size_t>(device_index));
  const size_t total = round_up(Configuration::instance().memory_bytes, kPage);
  // Compared before it is rounded: only sizes up to the device's memory round without overflow.
  const size_t rounded = bytes <= total ? round_up(bytes, kAlignment) : bytes;
  void* address = rounded <= total - device.used
                      ? device.gaps.carve(device.next, room_of(rounded),
                                          rounded < kOsPage ? kAlignment : kOsPage)
                      : nullptr;
  if (address == nullptr) {
    throw Failure(FailureKind::kOutOfMemory,
                  "vnpu: device " + std::to_string(device_index) +
                      " is out of memory: " + std::to_string(bytes) + " bytes asked for, " +
                      std::to_string(total - device.used) + " of " + std::to_string(total) +
                      " bytes free. VNPU_MEMORY sets the size of the virtual device.");
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  device.used += rounded;
  device.next = begin + room_of(rounded);
  live_[begin] = Allocation{begin, rounded, device_index, ++allocations_};
  freed_.erase(begin);
  return address;
}

void Memory::release(void* address) { reclaim(withdraw(address)); }

Memory::Allocation Memory::withdraw(void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::unique_lock lock(mutex_);
  const auto it = live_.find(begin);
  if (it == live_.end() || mapped_.count(begin) != 0) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: aclrtFree of an address that no allocation starts at: " +
                      describe_locked(begin) + ".");
  }
  const Allocation allocation = it->second;
  live_.erase(it);
  live_generation_.fetch_add(1, std::memory_order_release);
  devices_[static_cast<size_t>(allocation.device)].used -= allocation.bytes;
  remember_freed(allocation);
  return allocation;
}

void Memory::reclaim(const Allocation& allocation) {
  const uintptr_t begin = allocation.begin;
  const size_t room = room_of(allocation.bytes);
  bool was_in_file = false;
  {
    std::unique_lock lock(mutex_);
    if (const auto file = files_.find(begin); file != files_.end()) {
      was_in_file = true;
      map_private(begin + distance_, room);
      ::close(file->second);
      files_.erase(file);
    }
    devices_[static_cast<size_t>(allocation.device)].gaps.give_back(begin, room);
  }
  MemoryWatch::instance().changed({begin, begin + allocation.bytes});
  if (was_in_file) return;
  // Whole pages go back to the host; what remains at the ends is rewritten by its next owner.
  const uintptr_t first = round_up(begin + distance_, kOsPage);
  const uintptr_t last = (begin + distance_ + allocation.bytes) / kOsPage * kOsPage;
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

size_t Memory::bytes_at(const void* begin) const {
  std::shared_lock lock(mutex_);
  const auto it = live_.find(reinterpret_cast<uintptr_t>(begin));
  return it == live_.end() ? 0 : it->second.bytes;
}

size_t Memory::total_bytes(int) const {
  return round_up(Configuration::instance().memory_bytes, kPage);
}

size_t Memory::free_bytes(int device) const {
  std::shared_lock lock(mutex_);
  return total_bytes(device) - devices_.at(static_cast<size_t>(device)).used;
}

// --- access --------------------------------------------------------------------------------

bool Memory::is_live(const void* address, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  uintptr_t end;
  if (__builtin_add_overflow(begin, bytes, &end)) return false;
  const uint64_t generation = live_generation_.load(std::memory_order_acquire);
  if (last_range.generation == generation && begin >= last_range.begin && end <= last_range.end) {
    return true;
  }
  // The program's own memory, where it is mapped for the device.
  if (!is_device_address(address)) return PinnedMemory::instance().is_mapped(address, bytes);
  std::shared_lock lock(mutex_);
  auto it = live_.upper_bound(begin);
  if (it == live_.begin()) return false;
  --it;
  // Neighbouring mappings of one reserved range form one usable range.
  const uintptr_t range_begin = it->first;
  uintptr_t range_end = it->first + it->second.bytes;
  if (begin >= range_end) return false;
  while (range_end < end) {
    const auto next = live_.find(range_end);
    if (next == live_.end() || mapped_.count(range_end) == 0) return false;
    range_end += next->second.bytes;
  }
  last_range = LastRange{generation, range_begin, range_end};
  return true;
}

bool Memory::is_exclusive(const void* address, size_t bytes) const {
  if (!is_device_address(address) || !is_live(address, bytes)) return false;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::shared_lock lock(mutex_);
  if (begin < reservable_begin_) return !is_in_file(begin);
  for (auto it = std::prev(mapped_.upper_bound(begin));
       it != mapped_.end() && it->first < begin + bytes; ++it) {
    if (it->second.physical->shared) return false;
  }
  return true;
}

void Memory::check(const void* address, size_t bytes, const char* what) const {
  if (is_live(address, bytes)) return;
  std::shared_lock lock(mutex_);
  char range[64];
  std::snprintf(range, sizeof(range), "%p .. +%zu bytes", address, bytes);
  throw Failure(FailureKind::kIllegalAddress,
                std::string("vnpu: ") + what + " uses " + range +
                    ", which does not lie within one live allocation: " +
                    describe_locked(reinterpret_cast<uintptr_t>(address)) + ".");
}

void Memory::zero(void* address, size_t bytes) {
  char* target = backing(static_cast<char*>(address));
  const auto begin = reinterpret_cast<uintptr_t>(target);
  const uintptr_t first = round_up(begin, kOsPage);
  const uintptr_t last = (begin + bytes) / kOsPage * kOsPage;
  const auto device_begin = reinterpret_cast<uintptr_t>(address);
  if (bytes < kDropThreshold || !is_device_address(address)) {
    std::memset(target, 0, bytes);
    return;
  }
  std::memset(target, 0, first - begin);
  // Pages of mapped memory belong to a file, which other processes that map it read as zeros, too.
  const bool is_private = [&] {
    std::shared_lock lock(mutex_);
    return device_begin < reservable_begin_ && !is_in_file(device_begin);
  }();
  const int advice = is_private ? MADV_DONTNEED : MADV_REMOVE;
  if (::madvise(reinterpret_cast<void*>(first), last - first, advice) != 0) {
    std::memset(reinterpret_cast<void*>(first), 0, last - first);
  }
  std::memset(reinterpret_cast<void*>(last), 0, begin + bytes - last);
}

}  // namespace vnpu
