// Device and pinned host memory, copies.

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/freed_memory.h"
#include "device/checked_sizes.h"
#include "device/configuration.h"
#include "device/faults.h"
#include "device/host_counts.h"
#include "device/observer.h"
#include "device/pinned_memory.h"
#include "device/system.h"
#include "timing/model.h"
#include "timing/variants.h"

using namespace vnpu;
using abi::guarded;

namespace {

constexpr size_t kHostPage = 4096;  // bytes

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

// Copies when the stream reaches the task: the source is read then, not at the call.
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

// Accepts device memory and host memory that is registered with the runtime.
// Source: hicann/runtime docs/zh/api_ref/11-03, aclrtMemset.
void check_fill(const void* address, size_t room, size_t bytes, const char* function) {
  if (bytes > room) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: a fill of " + std::to_string(bytes) +
                                                     " bytes into room for " +
                                                     std::to_string(room) + ".");
  }
  const PinnedMemory& pinned = PinnedMemory::instance();
  if (bytes == 0 || pinned.contains(address, bytes)) return;
  Memory::instance().check(address, bytes, function);
}

void check_copy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: a copy of " + std::to_string(bytes) +
                                                     " bytes into room for " +
                                                     std::to_string(room) + ".");
  }
  for (const void* const address : {static_cast<const void*>(to), from}) {
    checked_add(reinterpret_cast<uintptr_t>(address), bytes, "the end of a copy");
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
    abi::tell_of_free(address, "aclrtFree");
    abi::free_when_unused(address);
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
    faults::reach(faults::Kind::kPinned);
    const size_t pages =
        checked_round_up(bytes, kHostPage, "the size of host memory", FailureKind::kOutOfMemory);
    *address = std::aligned_alloc(kHostPage, pages);
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
    // A prefetch into L2 changes no contents, only the time of later reads.
    auto* const model = timing::Model::instance();
    if (model == nullptr) return;
    const StreamPtr& on = abi::stream_of(stream);
    System::instance().executor().look([&] {
      model->prefetch(*on, address, bytes);
      if (auto* variants = timing::Variants::instance()) variants->prefetch(*on, address, bytes);
    });
  });
}
