#include "device/memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "device/configuration.h"
#include "device/failure.h"
#include "device/memory_watch.h"
#include "device/pinned_memory.h"

namespace vnpu {
namespace {

constexpr size_t kReservable = size_t{4} << 40;  // bytes of address space for programs' own ranges
constexpr size_t kFreedHistory = 4096;           // freed allocations that reports can still name
constexpr size_t kDropThreshold = size_t{1} << 20;  // zeroing more than this drops pages instead
constexpr size_t kOsPage = 4096;
// A chip's driver maps pages, so that free memory is never too scattered for an allocation: there
// are more addresses than bytes.
constexpr size_t kAddressesPerByte = 2;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

struct sigaction previous_segv;

void write_text(const char* text) {
  // The only output that is allowed in a signal handler; a short write changes nothing.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void on_host_touch(int signal, siginfo_t* info, void* context) {
  if (Memory::instance().is_device_address(info->si_addr)) {
    char text[512];
    std::snprintf(text, sizeof(text),
                  "vnpu: host code touched device memory at %p (%s).\n"
                  "Device memory can be read and written by device work only: copy it to the host "
                  "first (tensor.cpu(), aclrtMemcpy).\n",
                  info->si_addr, Memory::instance().describe(info->si_addr).c_str());
    write_text(text);
  }
  if ((previous_segv.sa_flags & SA_SIGINFO) != 0 && previous_segv.sa_sigaction != nullptr) {
    previous_segv.sa_sigaction(signal, info, context);
    return;
  }
  ::sigaction(SIGSEGV, &previous_segv, nullptr);  // returns to the access, which faults again
}

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

// The last range that was found live: most launches hit the same few allocations.
struct LastRange {
  uint64_t generation = ~uint64_t{0};
  uintptr_t begin = 0;
  uintptr_t end = 0;
};
thread_local LastRange last_range;
std::atomic<uint64_t> live_generation{0};

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

  struct sigaction action = {};
  action.sa_sigaction = on_host_touch;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &previous_segv);
}

void* Memory::carve(std::map<uintptr_t, size_t>& gaps, uintptr_t start, size_t bytes) {
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
    if (around->first + around->second >= start + bytes) return take(around, start);
  }
  for (auto gap = after; gap != gaps.end(); ++gap) {
    if (gap->second >= bytes) return take(gap, gap->first);
  }
  for (auto gap = gaps.begin(); gap != after; ++gap) {
    if (gap->second >= bytes) return take(gap, gap->first);
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
  const size_t rounded = round_up(bytes, kAlignment);
  std::unique_lock lock(mutex_);
  Device& device = devices_.at(static_cast<size_t>(device_index));
  const size_t total = round_up(Configuration::instance().memory_bytes, kPage);
  void* address =
      rounded <= total - device.used ? carve(device.gaps, device.next, rounded) : nullptr;
  if (address == nullptr) {
    throw Failure(FailureKind::kOutOfMemory,
                  "vnpu: device " + std::to_string(device_index) +
                      " is out of memory: " + std::to_string(bytes) + " bytes asked for, " +
                      std::to_string(total - device.used) + " of " + std::to_string(total) +
                      " bytes free. VNPU_MEMORY sets the size of the virtual device.");
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  device.used += rounded;
  device.next = begin + rounded;
  live_[begin] = Allocation{begin, rounded, device_index, ++allocations_};
  freed_.erase(begin);
  return address;
}

void Memory::release(void* address) {
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
  live_generation.fetch_add(1, std::memory_order_release);
  Device& device = devices_[static_cast<size_t>(allocation.device)];
  device.used -= allocation.bytes;
  give_back(device.gaps, begin, allocation.bytes);
  remember_freed(allocation);
  lock.unlock();
  MemoryWatch::instance().changed({begin, begin + allocation.bytes});
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

// --- programs' own address ranges ----------------------------------------------------------

Memory::Physical::Physical(int file, size_t bytes, int device, bool owner)
    : file(file), bytes(bytes), device(device), owner(owner), shared(!owner) {}

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
  const size_t rounded = round_up(bytes, kPage);
  void* address = carve(reserved_gaps_, reservable_begin_, rounded);
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
  give_back(reserved_gaps_, begin, it->second);
  reserved_.erase(it);
}

std::shared_ptr<Memory::Physical> Memory::create_physical(int device_index, size_t bytes) {
  if (bytes == 0 || bytes % kPage != 0) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: physical memory comes in multiples of " +
                                                     std::to_string(kPage) + " bytes; asked for " +
                                                     std::to_string(bytes) + ".");
  }
  {
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
  }
  const int file = ::memfd_create("vnpu", MFD_CLOEXEC);
  auto physical = std::make_shared<Physical>(file, bytes, device_index, true);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    throw Failure(FailureKind::kOutOfMemory,
                  std::string("vnpu: no backing file for device memory: ") + std::strerror(errno));
  }
  return physical;
}

std::shared_ptr<Memory::Physical> Memory::import_physical(int pid, int file, size_t bytes,
                                                          int device) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) {
    throw Failure(FailureKind::kInvalidHandle, "vnpu: the exported memory of process " +
                                                   std::to_string(pid) +
                                                   " cannot be opened: " + std::strerror(errno));
  }
  return std::make_shared<Physical>(own, bytes, device, false);
}

void Memory::map(void* address, size_t bytes, size_t offset,
                 const std::shared_ptr<Physical>& physical) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::unique_lock lock(mutex_);
  const auto after = reserved_.upper_bound(begin);
  const bool inside = after != reserved_.begin() &&
                      begin + bytes <= std::prev(after)->first + std::prev(after)->second;
  const auto next = mapped_.lower_bound(begin);
  const bool overlaps =
      (next != mapped_.end() && next->first < begin + bytes) ||
      (next != mapped_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > begin);
  if (!inside || overlaps || offset + bytes > physical->bytes) {
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
  void* target = reinterpret_cast<void*>(begin + distance_);
  if (::mmap(target, it->second.bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: munmap failed: ") + std::strerror(errno));
  }
  const size_t bytes = it->second.bytes;
  last_owner = std::move(it->second.physical);
  mapped_.erase(it);
  remember_freed(live_[begin]);
  live_.erase(begin);
  live_generation.fetch_add(1, std::memory_order_release);
  lock.unlock();
  MemoryWatch::instance().changed({begin, begin + bytes});
}

// --- access --------------------------------------------------------------------------------

bool Memory::is_live(const void* address, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + bytes;
  const uint64_t generation = live_generation.load(std::memory_order_acquire);
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
  if (begin < reservable_begin_) return true;
  std::shared_lock lock(mutex_);
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
  const int advice = device_begin < reservable_begin_ ? MADV_DONTNEED : MADV_REMOVE;
  if (::madvise(reinterpret_cast<void*>(first), last - first, advice) != 0) {
    std::memset(reinterpret_cast<void*>(first), 0, last - first);
  }
  std::memset(reinterpret_cast<void*>(last), 0, begin + bytes - last);
}

std::string Memory::describe(const void* address) const {
  std::shared_lock lock(mutex_);
  return describe_locked(reinterpret_cast<uintptr_t>(address));
}

std::string Memory::describe_locked(uintptr_t address) const {
  const auto find = [&](const std::map<uintptr_t, Allocation>& in) -> const Allocation* {
    auto it = in.upper_bound(address);
    if (it == in.begin()) return nullptr;
    --it;
    return address < it->first + it->second.bytes ? &it->second : nullptr;
  };
  const auto text = [&](const Allocation& a, const char* state) {
    return "byte " + std::to_string(address - a.begin) + " of allocation #" +
           std::to_string(a.number) + " on device " + std::to_string(a.device) + " (" +
           std::to_string(a.bytes) + " bytes), " + state;
  };
  if (const Allocation* a = find(live_)) return text(*a, "live");
  if (const Allocation* a = find(freed_)) return text(*a, "freed (use after free)");
  if (address == 0) return "a null address";
  if (address >= begin_ && address < end_) return "device memory that was never allocated";
  return "host memory";
}

}  // namespace vnpu
