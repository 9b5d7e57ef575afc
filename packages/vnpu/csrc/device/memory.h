#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "device/address_gaps.h"
#include "device/host_touch.h"
#include "device/touched.h"

namespace vnpu {

// Device memory has two faces. Programs hold *device addresses*: a reserved range without any
// access rights, so that host code which dereferences one stops at once. Operators work on the same
// bytes through the *backing*, a second range at a constant distance. Chip-sized reservations cost
// nothing; pages come into being when they are first written.
//
// Layout of the one reservation: devices' memory (device_count x twice memory_bytes), then the
// range for addresses that programs reserve themselves (virtual memory management).
class Memory {
 public:
  static constexpr size_t kAlignment = 512;               // bytes, as the runtime guarantees
  static constexpr size_t kPage = size_t{2} << 20;        // granularity of physical handles
  static constexpr size_t kOsPage = 4096;                 // the host's
  static constexpr size_t kReservable = size_t{4} << 40;  // bytes of addresses for programs' ranges

  struct Allocation {
    uintptr_t begin;
    size_t bytes;
    int device;
    uint64_t number;  // counts allocations of the process, from 1
  };

  static Memory& instance();

  // --- allocations -------------------------------------------------------------------------
  // Returns a device address; throws kOutOfMemory when the device's memory is used up.
  void* allocate(int device, size_t bytes);
  void release(void* address);
  // The two steps of release(): after withdraw() the memory counts as free and may not be used;
  // after reclaim() its address range may be reused.
  Allocation withdraw(void* address);
  void reclaim(const Allocation& allocation);
  // Gives an allocation this file as its backing, with the bytes that are in it, until it is freed;
  // closes the file then. Other processes may write it too. Nobody may use the memory meanwhile.
  // file: of whole_pages(bytes) or more. Throws kInvalidArgument unless an allocation begins there
  // that has pages of its own.
  void move_to_file(const Allocation& allocation, int file);
  static size_t whole_pages(size_t bytes);
  // The live allocation that begins there. Throws kInvalidArgument where there is none, or memory
  // that the program has mapped itself; `function`: the caller, for the message.
  Allocation allocation_at(const void* begin, const char* function) const;
  size_t free_bytes(int device) const;
  size_t total_bytes(int device) const;

  // --- programs' own address ranges (expandable segments, sleep mode) ------------------------
  struct Physical;  // memory without an address
  void* reserve(size_t bytes, void* hint);
  void unreserve(void* address);
  std::shared_ptr<Physical> create_physical(int device, size_t bytes);
  // identity: of physical memory of this or another process. Throws kInvalidHandle where there is
  // none any more.
  std::shared_ptr<Physical> import_physical(uint64_t identity, int device);
  void map(void* address, size_t bytes, size_t offset, const std::shared_ptr<Physical>& physical);
  void unmap(void* address);
  // From now on other processes may write the memory too.
  void share(Physical& physical);

  // --- access ------------------------------------------------------------------------------
  bool is_device_address(const void* address) const {
    const auto a = reinterpret_cast<uintptr_t>(address);
    return a >= begin_ && a < end_;
  }
  // The device address whose backing this is; null for any other memory.
  const void* device_address(const void* backing) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(backing) - distance_;
    return address >= begin_ && address < end_ ? reinterpret_cast<const void*>(address) : nullptr;
  }
  // The bytes behind an address: a device address's backing, or the host address itself.
  template <class T>
  T* backing(T* address) const {
    return is_device_address(address)
               ? reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(address) + distance_)
               : address;
  }
  // Throws kIllegalAddress, with the history of the address, unless [address, address + bytes)
  // lies within one live allocation. `what` names the user: "aclnnAdd argument 2 (other)".
  void check(const void* address, size_t bytes, const char* what) const;
  // Bytes of the live allocation that starts there; 0 if there is none.
  size_t bytes_at(const void* begin) const;
  // True if the range lies within one live allocation.
  bool is_live(const void* address, size_t bytes) const;
  // True if the range lies within one live allocation that can be written only through these
  // addresses of this process.
  bool is_exclusive(const void* address, size_t bytes) const;
  // Fills with zero bytes; large private ranges give their pages back instead.
  void zero(void* address, size_t bytes);
  // "allocation #12 of device 0, 2097152 bytes, freed" ...
  std::string describe(const void* address) const;
  // Likewise, for a signal handler.
  HostTouch look_up(const void* address) const;

 private:
  Memory();
  struct Device {
    uintptr_t begin = 0;
    uintptr_t next = 0;  // where the search for room starts: freed room rests
    size_t used = 0;
    AddressGaps gaps;
  };
  struct Mapping {
    size_t bytes;
    std::shared_ptr<Physical> physical;
  };

  void tell_changed(const Physical& physical) const;
  bool is_in_file(uintptr_t address) const;
  // Gives a range of the backing fresh pages of its own. Throws kInternal.
  static void map_private(uintptr_t backing, size_t bytes);
  void remember_freed(const Allocation& allocation);
  std::string describe_locked(uintptr_t address) const;
  static const Allocation* holder(const std::map<uintptr_t, Allocation>& in, uintptr_t address);

  uintptr_t begin_ = 0;
  uintptr_t end_ = 0;
  uintptr_t distance_ = 0;
  uintptr_t reservable_begin_ = 0;
  mutable std::shared_mutex mutex_;
  std::atomic<uint64_t> live_generation_{0};  // counts changes that end a live range
  std::vector<Device> devices_;
  std::map<uintptr_t, Allocation> live_;   // by begin, mapped ranges included
  std::map<uintptr_t, Allocation> freed_;  // by begin, the newest of each address
  std::deque<uintptr_t> freed_order_;      // oldest first
  AddressGaps reserved_gaps_;
  std::map<uintptr_t, size_t> reserved_;
  std::map<uintptr_t, Mapping> mapped_;
  std::map<uintptr_t, int> files_;  // of allocations that other processes use, by begin
  uint64_t allocations_ = 0;
};

// Memory without an address: a sparse file, so that it can be mapped anywhere and shared.
struct Memory::Physical {
  Physical(uint64_t identity, int file, size_t bytes, int device, bool owner);
  ~Physical();
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  const uint64_t identity;  // names it in all processes
  int file;
  size_t bytes;
  int device;
  bool owner;           // counts against the device's memory
  bool shared = false;  // can be written through several addresses, or by other processes
};

}  // namespace vnpu
