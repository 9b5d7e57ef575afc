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

constexpr size_t kFreedHistory = 4096;              // freed allocations that reports can still name
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

// Those of a page or more have pages of their own, which can be given to other processes.
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
    device.gaps.emplace(at, per_device);
    at += per_device;
  }
  reservable_begin_ = at;
  reserved_gaps_.emplace(at, kReservable);

  report_host_touches([](const void* address) { return instance().look_up(address); });
}

void* Memory::carve(std::map<uintptr_t, size_t>& gaps, uintptr_t start, size_t bytes,
                    size_t alignment) {
  // The first place in a gap, from an address on; 0 if the gap has none.
  const auto place = [&](const std::pair<const uintptr_t, size_t>& gap, uintptr_t from) {
    const uintptr_t begin = round_up(std::max(gap.first, from), alignment);
    const uintptr_t end = gap.first + gap.second;
    return begin < end && end - begin >= bytes ? begin : 0;
  };
  const auto take = [&](std::map<uintptr_t, size_t>::iterator gap, uintptr_t begin) {
    const auto [gap_begin, gap_bytes] = *gap;
    gaps.erase(gap);
    if (begin > gap_begin) gaps.emplace(gap_begin, begin - gap_begin);
    const size_t rest = gap_begin + gap_bytes - begin - bytes;
    if (rest > 0) gaps.emplace(begin + bytes, rest);
    return reinterpret_cast<void*>(begin);
  };
  // Next fit, from `start` on: freed room is used again as late as possible, so that a stale
  // address stays stale.
  const auto after = gaps.lower_bound(start);
  if (after != gaps.begin()) {
    const auto around = std::prev(after);
    if (const uintptr_t begin = place(*around, start)) return take(around, begin);
  }
  for (auto gap = after; gap != gaps.end(); ++gap) {
    if (const uintptr_t begin = place(*gap, 0)) return take(gap, begin);
  }
  for (auto gap = gaps.begin(); gap != after; ++gap) {
    if (const uintptr_t begin = place(*gap, 0)) return take(gap, begin);
  }
  return nullptr;
}

void Memory::give_back(std::map<uintptr_t, size_t>& gaps, uintptr_t begin, size_t bytes) {
  auto next = gaps.lower_bound(begin);
  if (next != gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      gaps.erase(before);
    }
  }
  if (next != gaps.end() && begin + bytes == next->first) {
    bytes += next->second;
    gaps.erase(next);
  }
  gaps.emplace(begin, bytes);
}

void* Memory::allocate(int device_index, size_t bytes) {
  if (bytes == 0) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: an allocation of 0 bytes was asked for.");
  }
  faults::reach(faults::Kind::kAlloc);
  std::unique_lock lock(mutex_);
  Device& device = devices_.at(static_cast<size_t>(device_index));
  const size_t total = round_up(Configuration::instance().memory_bytes, kPage);
  // Compared before it is rounded: what is no larger than the device can be rounded.
  const size_t rounded = bytes <= total ? round_up(bytes, kAlignment) : bytes;
  void* address = rounded <= total - device.used ? carve(device.gaps, device.next, room_of(rounded),
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
    give_back(devices_[static_cast<size_t>(allocation.device)].gaps, begin, room);
  }
  MemoryWatch::instance().changed({begin, begin + allocation.bytes});
  if (was_in_file) return;
  // Whole pages go back to the host; what remains at the ends is rewritten by its next owner.
  const uintptr_t first = round_up(begin + distance_, kOsPage);
  const uintptr_t last = (begin + distance_ + allocation.bytes) / kOsPage * kOsPage;
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void Memory::remember_freed(const Allocation& allocation) {
  if (freed_order_.size() >= kFreedHistory) {
    freed_.erase(freed_order_.front());
    freed_order_.pop_front();
  }
  if (freed_.insert_or_assign(allocation.begin, allocation).second) {
    freed_order_.push_back(allocation.begin);
  }
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
  // Pages of mapped memory are a file's, which whoever shares them reads as zeros, too.
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
  if (!lock.owns_lock()) return touch;  // another thread changes what there is
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
