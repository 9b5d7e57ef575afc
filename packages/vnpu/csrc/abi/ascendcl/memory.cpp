// Device and pinned host memory, copies, programs' own address ranges.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "abi/ascendcl/declarations.h"
#include "device/configuration.h"
#include "device/host_counts.h"
#include "device/observer.h"
#include "device/pinned_memory.h"
#include "device/system.h"
#include "timing/model.h"

using namespace vnpu;
using abi::guarded;

namespace {

// Before the program gives pinned memory back.
void give_back(void* address, bool owned, const char* function) {
  PinnedMemory& pinned = PinnedMemory::instance();
  const size_t bytes = pinned.bytes(address, owned, function);
  if (const Observers& observers = Observers::instance(); observers.any()) {
    const std::string site = observers.call_site();
    System::instance().executor().tell(&Observer::on_host_free, address, bytes, site);
  }
  pinned.remove(address, owned);
}

// Before memory of the current device goes. Neither aclrtFree nor aclrtUnmapMem waits for work that
// still uses the memory: it is the program that has to, and the race detector says where it does
// not. What is queued runs all the same, so that what a program computes does not depend on it.
// Source: CANN's runtime, 11-01_device_memory_malloc_and_free.md, aclrtFree.
void let_go(const void* address, const char* function) {
  Executor& executor = System::instance().executor();
  const Observers& observers = Observers::instance();
  if (const size_t bytes = Memory::instance().bytes_at(address); bytes > 0 && observers.any()) {
    const std::string site = observers.call_site();
    executor.tell(&Observer::on_device_free, address, bytes, function, site);
  }
  if (System::current_device() >= 0) executor.drain_device(System::current_device());
}

// Copies when the stream reaches it: the source is read then, not when it was asked for.
class Copy final : public Task {
 public:
  Copy(void* to, const void* from, size_t bytes)
      : Task("memory copy"), to_(to), from_(from), bytes_(bytes) {
    add(from, false);  // host memory too: two copies into one buffer need an order
    add(to, true);
  }
  Progress advance() override {
    const Memory& memory = Memory::instance();
    if (Configuration::instance().compute || !memory.is_device_address(to_)) {
      std::memmove(memory.backing(static_cast<char*>(to_)),
                   memory.backing(static_cast<const char*>(from_)), bytes_);
    }
    return Progress::kDone;
  }

 private:
  void add(const void* address, bool write) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    touched.add({begin, begin + bytes_, write});
  }
  void* to_;
  const void* from_;
  size_t bytes_;
};

class Fill final : public Task {
 public:
  Fill(void* address, int value, size_t bytes)
      : Task("memory fill"), address_(address), value_(value), bytes_(bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    touched.add({begin, begin + bytes, true});
  }
  Progress advance() override {
    Memory& memory = Memory::instance();
    if (!Configuration::instance().compute && memory.is_device_address(address_)) {
      return Progress::kDone;
    }
    if (value_ == 0) {
      memory.zero(address_, bytes_);
    } else {
      std::memset(memory.backing(static_cast<char*>(address_)), value_, bytes_);
    }
    return Progress::kDone;
  }

 private:
  void* address_;
  int value_;
  size_t bytes_;
};

// The device's memory, or the host's that the runtime knows.
// Source: hicann/runtime docs/zh/api_ref/11-03, aclrtMemset.
void check_fill(const void* address, size_t room, size_t bytes, const char* function) {
  if (bytes > room) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: a fill of " + std::to_string(bytes) +
                                                     " bytes into room for " +
                                                     std::to_string(room) + ".");
  }
  const PinnedMemory& pinned = PinnedMemory::instance();
  const auto* const first = static_cast<const char*>(address);
  if (bytes == 0 || (pinned.contains(first) && pinned.contains(first + bytes - 1))) return;
  Memory::instance().check(address, bytes, function);
}

void check_copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: a copy of " + std::to_string(bytes) +
                                                     " bytes into room for " +
                                                     std::to_string(room) + ".");
  }
  const Memory& memory = Memory::instance();
  const bool device_to = memory.is_device_address(to);
  const bool device_from = memory.is_device_address(from);
  const bool want_to = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  const bool want_from = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (kind <= ACL_MEMCPY_DEVICE_TO_DEVICE && (want_to != device_to || want_from != device_from)) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: the direction of a copy (kind " + std::to_string(kind) +
                      ") does not fit its addresses: from " + memory.describe(from) + ", to " +
                      memory.describe(to) + ".");
  }
  if (device_from) memory.check(from, bytes, "the source of a copy");
  if (device_to) memory.check(to, bytes, "the destination of a copy");
  if (device_from && !device_to) ++HostCounts::instance().copies_to_host;
}

void copy_async(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                aclrtStream stream) {
  if (bytes == 0) return;
  check_copy(to, room, from, bytes, kind);
  const Memory& memory = Memory::instance();
  const auto is_pageable = [&](const void* address) {
    return !memory.is_device_address(address) && !PinnedMemory::instance().contains(address);
  };
  if (is_pageable(to) || is_pageable(from)) {
    abi::check_synchronous("an asynchronous copy with pageable host memory");
  }
  System::instance().executor().submit(abi::stream_of(stream),
                                       std::make_shared<Copy>(to, from, bytes));
}

using PhysicalPtr = std::shared_ptr<Memory::Physical>;

PhysicalPtr& physical_of(aclrtDrvMemHandle handle) {
  if (handle == nullptr) {
    throw Failure(FailureKind::kInvalidHandle, "vnpu: the physical memory handle is null.");
  }
  return *static_cast<PhysicalPtr*>(handle);
}

// A shareable handle carries everything another process needs: pid, file and pages.
struct Shareable {
  static uint64_t pack(const Memory::Physical& physical) {
    const uint64_t pages = physical.bytes / Memory::kPage;
    if (pages >= (1u << 18) || physical.file >= (1 << 12)) {
      throw Failure(FailureKind::kNotSupported,
                    "vnpu: this physical memory is too large to be shared (512 GiB at most).");
    }
    return (static_cast<uint64_t>(::getpid()) << 32) | (pages << 12) |
           static_cast<uint64_t>(physical.file);
  }
  explicit Shareable(uint64_t packed)
      : pid(static_cast<int>(packed >> 32)),
        file(static_cast<int>(packed & 0xfff)),
        bytes(((packed >> 12) & 0xfffff) * Memory::kPage) {}
  int pid;
  int file;
  size_t bytes;
};

void register_host(void* address, uint64_t bytes, bool is_mapped) {
  if (address == nullptr || bytes == 0) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: host memory to register has address " +
                      std::to_string(reinterpret_cast<uintptr_t>(address)) + " and " +
                      std::to_string(bytes) + " bytes; neither may be 0.");
  }
  PinnedMemory::instance().add(address, bytes, false, is_mapped);
}

}  // namespace

VNPU_ACL(aclrtMalloc, (void** address, size_t bytes, aclrtMemMallocPolicy)) {
  return guarded("aclrtMalloc", [&] {
    System& system = System::instance();
    *address = Memory::instance().allocate(system.physical(system.require_current_device()), bytes);
  });
}
VNPU_ACL(aclrtMallocAlign32, (void** address, size_t bytes, aclrtMemMallocPolicy policy)) {
  return aclrtMalloc(address, bytes, policy);
}
VNPU_ACL(aclrtFree, (void* address)) {
  return guarded("aclrtFree", [&] {
    if (address == nullptr) return;
    let_go(address, "aclrtFree");
    Memory::instance().release(address);
  });
}
VNPU_ACL(aclrtGetMemInfo, (aclrtMemAttr, size_t* free_bytes, size_t* total_bytes)) {
  return guarded("aclrtGetMemInfo", [&] {
    System& system = System::instance();
    const int device = system.physical(system.require_current_device());
    *free_bytes = Memory::instance().free_bytes(device);
    *total_bytes = Memory::instance().total_bytes(device);
  });
}

VNPU_ACL(aclrtMallocHost, (void** address, size_t bytes)) {
  return guarded("aclrtMallocHost", [&] {
    if (bytes == 0) throw Failure(FailureKind::kInvalidArgument, "vnpu: 0 bytes of host memory.");
    *address = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (*address == nullptr) throw std::bad_alloc();
    PinnedMemory::instance().add(*address, bytes, true);
  });
}
VNPU_ACL(aclrtMallocHostWithCfg, (void** address, uint64_t bytes, aclrtMallocConfig*)) {
  return aclrtMallocHost(address, bytes);
}
VNPU_ACL(aclrtFreeHost, (void* address)) {
  return guarded("aclrtFreeHost", [&] {
    give_back(address, true, "aclrtFreeHost");
    std::free(address);
  });
}
VNPU_ACL(aclrtHostRegister,
         (void* address, uint64_t bytes, aclrtHostRegisterType type, void** device)) {
  return guarded("aclrtHostRegister", [&] {
    register_host(address, bytes, type == ACL_HOST_REGISTER_MAPPED);
    if (device != nullptr) *device = address;
  });
}
VNPU_ACL(aclrtHostRegisterV2, (void* address, uint64_t bytes, uint32_t flags)) {
  return guarded("aclrtHostRegisterV2",
                 [&] { register_host(address, bytes, (flags & ACL_HOST_REG_MAPPED) != 0); });
}
VNPU_ACL(aclrtHostUnregister, (void* address)) {
  return guarded("aclrtHostUnregister", [&] { give_back(address, false, "aclrtHostUnregister"); });
}
VNPU_ACL(aclrtPointerGetAttributes, (const void* address, aclrtPtrAttributes* attributes)) {
  return guarded("aclrtPointerGetAttributes", [&] {
    *attributes = {};
    attributes->pageSize = 4096;
    if (Memory::instance().is_device_address(address)) {
      attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
      attributes->location.id = static_cast<uint32_t>(std::max(0, System::current_device()));
    } else {
      attributes->location.type = PinnedMemory::instance().contains(address)
                                      ? ACL_MEM_LOCATION_TYPE_HOST
                                      : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    }
  });
}

// --- copies ---------------------------------------------------------------------------------

VNPU_ACL(aclrtMemcpy,
         (void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind)) {
  return guarded("aclrtMemcpy", [&] {
    if (bytes == 0) return;
    if (kind < ACL_MEMCPY_HOST_TO_HOST || kind > ACL_MEMCPY_DEFAULT) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: a copy of kind " + std::to_string(kind) + "; known are 0 to 4.");
    }
    // The addresses decide. Source: hicann/runtime docs/zh/api_ref/11-03, aclrtMemcpy, kind.
    check_copy(to, room, from, bytes, ACL_MEMCPY_DEFAULT);
    abi::check_synchronous("aclrtMemcpy");
    System& system = System::instance();
    const int device = system.require_current_device();
    system.executor().submit(system.default_stream(device),
                             std::make_shared<Copy>(to, from, bytes));
    system.executor().synchronize(system.default_stream(device), std::nullopt);
  });
}
VNPU_ACL(aclrtMemcpyAsync, (void* to, size_t room, const void* from, size_t bytes,
                            aclrtMemcpyKind kind, aclrtStream stream)) {
  return guarded("aclrtMemcpyAsync", [&] { copy_async(to, room, from, bytes, kind, stream); });
}
VNPU_ACL(aclrtMemcpyAsyncWithCondition, (void* to, size_t room, const void* from, size_t bytes,
                                         aclrtMemcpyKind kind, aclrtStream stream)) {
  return guarded("aclrtMemcpyAsyncWithCondition",
                 [&] { copy_async(to, room, from, bytes, kind, stream); });
}
VNPU_ACL(aclrtMemcpyBatchAsync,
         (void** to, size_t* room, void** from, size_t* bytes, size_t count, aclrtMemcpyBatchAttr*,
          size_t*, size_t, size_t* failed, aclrtStream stream)) {
  return guarded("aclrtMemcpyBatchAsync", [&] {
    for (size_t i = 0; i < count; ++i) {
      if (failed != nullptr) *failed = i;
      copy_async(to[i], room[i], from[i], bytes[i], ACL_MEMCPY_DEFAULT, stream);
    }
    if (failed != nullptr) *failed = ~size_t{0};
  });
}
VNPU_ACL(aclrtMemset, (void* address, size_t room, int32_t value, size_t bytes)) {
  return guarded("aclrtMemset", [&] {
    check_fill(address, room, bytes, "aclrtMemset");
    if (bytes == 0) return;
    abi::check_synchronous("aclrtMemset");
    Fill(address, value, bytes).step();
  });
}
VNPU_ACL(aclrtMemsetAsync,
         (void* address, size_t room, int32_t value, size_t bytes, aclrtStream stream)) {
  return guarded("aclrtMemsetAsync", [&] {
    check_fill(address, room, bytes, "aclrtMemsetAsync");
    if (bytes == 0) return;
    System::instance().executor().submit(abi::stream_of(stream),
                                         std::make_shared<Fill>(address, value, bytes));
  });
}
VNPU_ACL(aclrtCmoAsync, (void* address, size_t bytes, aclrtCmoType, aclrtStream stream)) {
  return guarded("aclrtCmoAsync", [&] {
    Memory::instance().check(address, bytes, "aclrtCmoAsync");
    // A prefetch into L2 changes no contents, but the time of who reads them.
    auto* const model = timing::Model::instance();
    if (model == nullptr) return;
    const StreamPtr& on = abi::stream_of(stream);
    System::instance().executor().look([&] { model->prefetch(*on, address, bytes); });
  });
}

// --- programs' own address ranges -------------------------------------------------------------

VNPU_ACL(aclrtReserveMemAddress, (void** address, size_t bytes, size_t, void* hint, uint64_t)) {
  return guarded("aclrtReserveMemAddress",
                 [&] { *address = Memory::instance().reserve(bytes, hint); });
}
VNPU_ACL(aclrtReleaseMemAddress, (void* address)) {
  return guarded("aclrtReleaseMemAddress", [&] { Memory::instance().unreserve(address); });
}
VNPU_ACL(aclrtMallocPhysical,
         (aclrtDrvMemHandle * handle, size_t bytes, const aclrtPhysicalMemProp* prop, uint64_t)) {
  return guarded("aclrtMallocPhysical", [&] {
    const int device = System::instance().physical(static_cast<int>(prop->location.id));
    *handle = new PhysicalPtr(Memory::instance().create_physical(device, bytes));
  });
}
VNPU_ACL(aclrtFreePhysical, (aclrtDrvMemHandle handle)) {
  return guarded("aclrtFreePhysical", [&] { delete &physical_of(handle); });
}
VNPU_ACL(aclrtMapMem,
         (void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t)) {
  return guarded("aclrtMapMem",
                 [&] { Memory::instance().map(address, bytes, offset, physical_of(handle)); });
}
VNPU_ACL(aclrtUnmapMem, (void* address)) {
  return guarded("aclrtUnmapMem", [&] {
    let_go(address, "aclrtUnmapMem");
    Memory::instance().unmap(address);
  });
}
VNPU_ACL(aclrtMemExportToShareableHandle,
         (aclrtDrvMemHandle handle, aclrtMemHandleType, uint64_t, uint64_t* shareable)) {
  return guarded("aclrtMemExportToShareableHandle", [&] {
    Memory::Physical& physical = *physical_of(handle);
    *shareable = Shareable::pack(physical);
    Memory::instance().share(physical);
  });
}
VNPU_ACL(aclrtMemSetPidToShareableHandle, (uint64_t, int32_t*, size_t)) { return 0; }
VNPU_ACL(aclrtMemImportFromShareableHandle,
         (uint64_t shareable, int32_t device, aclrtDrvMemHandle* handle)) {
  return guarded("aclrtMemImportFromShareableHandle", [&] {
    const Shareable s(shareable);
    *handle = new PhysicalPtr(Memory::instance().import_physical(
        s.pid, s.file, s.bytes, System::instance().physical(device)));
  });
}
