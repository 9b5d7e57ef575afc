// Programs' own address ranges, physical memory to map into them, and its way to other processes.

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/freed_memory.h"
#include "device/system.h"

using namespace vnpu;
using abi::guarded;

namespace {

using PhysicalPtr = std::shared_ptr<Memory::Physical>;

// A handle is a number, never an address: one that was freed is recognised instead of being
// followed.
class PhysicalHandles {
 public:
  static PhysicalHandles& instance() {
    // Never destroyed: torch_npu frees memory after static destructors have run.
    static PhysicalHandles* const handles = new PhysicalHandles();
    return *handles;
  }
  aclrtDrvMemHandle add(PhysicalPtr physical) {
    const std::lock_guard lock(mutex_);
    const uintptr_t handle = next_ += 16;
    live_.emplace(handle, std::move(physical));
    return reinterpret_cast<aclrtDrvMemHandle>(handle);
  }
  PhysicalPtr find(aclrtDrvMemHandle handle) {
    const std::lock_guard lock(mutex_);
    return live_entry(handle)->second;
  }
  void remove(aclrtDrvMemHandle handle) {
    PhysicalPtr last_owner;  // its destructor takes the memory's lock
    const std::lock_guard lock(mutex_);
    const auto entry = live_entry(handle);
    last_owner = std::move(entry->second);
    live_.erase(entry);
  }

 private:
  std::map<uintptr_t, PhysicalPtr>::iterator live_entry(aclrtDrvMemHandle handle) {
    const auto entry = live_.find(reinterpret_cast<uintptr_t>(handle));
    if (entry == live_.end()) {
      throw Failure(FailureKind::kInvalidHandle,
                    "vnpu: this is no live handle of physical memory (freed before its last "
                    "use, or freed twice?).");
    }
    return entry;
  }
  std::mutex mutex_;
  std::map<uintptr_t, PhysicalPtr> live_;
  uintptr_t next_ = 0x70687900;
};

PhysicalPtr physical_of(aclrtDrvMemHandle handle) {
  return PhysicalHandles::instance().find(handle);
}

}  // namespace

VNPU_ACL(aclrtReserveMemAddress, (void** address, size_t bytes, size_t, void* hint, uint64_t)) {
  return guarded("aclrtReserveMemAddress",
                 [&] { *address = Memory::instance().reserve(bytes, hint); });
}
VNPU_ACL(aclrtReleaseMemAddress, (void* address)) {
  return guarded("aclrtReleaseMemAddress", [&] { Memory::instance().unreserve(address); });
}
VNPU_ACL(aclrtMemGetAllocationGranularity,
         (aclrtPhysicalMemProp * prop, aclrtMemGranularityOptions option, size_t* granularity)) {
  return guarded("aclrtMemGetAllocationGranularity", [&] {
    if (prop == nullptr || granularity == nullptr ||
        (option != ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM &&
         option != ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: aclrtMemGetAllocationGranularity with option " +
                        std::to_string(static_cast<int>(option)) +
                        ": give properties, 0 (minimum) or 1 (recommended), and a place for it.");
    }
    *granularity = Memory::kPage;
  });
}
VNPU_ACL(aclrtMallocPhysical,
         (aclrtDrvMemHandle * handle, size_t bytes, const aclrtPhysicalMemProp* prop, uint64_t)) {
  return guarded("aclrtMallocPhysical", [&] {
    const int device = System::instance().physical(static_cast<int>(prop->location.id));
    *handle = PhysicalHandles::instance().add(Memory::instance().create_physical(device, bytes));
  });
}
VNPU_ACL(aclrtFreePhysical, (aclrtDrvMemHandle handle)) {
  return guarded("aclrtFreePhysical", [&] { PhysicalHandles::instance().remove(handle); });
}
VNPU_ACL(aclrtMapMem,
         (void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t)) {
  return guarded("aclrtMapMem",
                 [&] { Memory::instance().map(address, bytes, offset, physical_of(handle)); });
}
VNPU_ACL(aclrtUnmapMem, (void* address)) {
  return guarded("aclrtUnmapMem", [&] {
    abi::tell_of_free(address, "aclrtUnmapMem");
    abi::run_what_is_queued("aclrtUnmapMem");
    Memory::instance().unmap(address);
  });
}
VNPU_ACL(aclrtMemExportToShareableHandle,
         (aclrtDrvMemHandle handle, aclrtMemHandleType, uint64_t, uint64_t* shareable)) {
  return guarded("aclrtMemExportToShareableHandle", [&] {
    const PhysicalPtr physical = physical_of(handle);
    *shareable = physical->identity;
    Memory::instance().share(*physical);
  });
}
VNPU_ACL(aclrtMemSetPidToShareableHandle, (uint64_t, int32_t*, size_t)) { return 0; }
VNPU_ACL(aclrtMemImportFromShareableHandle,
         (uint64_t shareable, int32_t device, aclrtDrvMemHandle* handle)) {
  return guarded("aclrtMemImportFromShareableHandle", [&] {
    *handle = PhysicalHandles::instance().add(
        Memory::instance().import_physical(shareable, System::instance().physical(device)));
  });
}

// --- handles of 128 bytes too ------------------------------------------------------------------

namespace {

// Number of the memory among all processes of this host, in either form of a handle.
uint64_t& identity_in(void* shareable, aclrtMemSharedHandleType type, const char* function) {
  if (shareable == nullptr ||
      (type != ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT && type != ACL_MEM_SHARE_HANDLE_TYPE_FABRIC)) {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: ") + function + " with a handle of type " +
                      std::to_string(static_cast<int>(type)) +
                      ": give a place for it, and 1 (default) or 2 (fabric).");
  }
  return *static_cast<uint64_t*>(shareable);
}

}  // namespace

VNPU_ACL(aclrtMemExportToShareableHandleV2, (aclrtDrvMemHandle handle, uint64_t flags,
                                             aclrtMemSharedHandleType type, void* shareable)) {
  constexpr const char* kName = "aclrtMemExportToShareableHandleV2";
  return guarded(kName, [&] {
    if (flags != ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION) {
      throw Failure(FailureKind::kNotSupported,
                    std::string("vnpu: ") + kName + " with flags " + std::to_string(flags) +
                        ": no list of processes that may import is kept. Give " +
                        "ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION (1).");
    }
    uint64_t& identity = identity_in(shareable, type, kName);
    const PhysicalPtr physical = physical_of(handle);
    if (type == ACL_MEM_SHARE_HANDLE_TYPE_FABRIC) {
      std::memset(shareable, 0, sizeof(aclrtMemFabricHandle));
    }
    identity = physical->identity;
    Memory::instance().share(*physical);
  });
}
VNPU_ACL(aclrtMemImportFromShareableHandleV2, (void* shareable, aclrtMemSharedHandleType type,
                                               uint64_t flags, aclrtDrvMemHandle* handle)) {
  constexpr const char* kName = "aclrtMemImportFromShareableHandleV2";
  return guarded(kName, [&] {
    const uint64_t identity = identity_in(shareable, type, kName);
    if (flags != 0) {
      throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: ") + kName + " with flags " +
                                                       std::to_string(flags) + ": give 0.");
    }
    System& system = System::instance();
    const int device = system.physical(system.require_current_device());
    *handle = PhysicalHandles::instance().add(Memory::instance().import_physical(identity, device));
  });
}
// Each device of this process reads and writes what is mapped, from the mapping on.
VNPU_ACL(aclrtMemSetAccess,
         (void* address, size_t bytes, aclrtMemAccessDesc* rights, size_t count)) {
  constexpr const char* kName = "aclrtMemSetAccess";
  return guarded(kName, [&] {
    if (rights == nullptr || count == 0 || bytes == 0 ||
        Memory::instance().bytes_at(address) != bytes) {
      throw Failure(FailureKind::kInvalidArgument,
                    std::string("vnpu: ") + kName + " of " + std::to_string(bytes) +
                        " bytes: give rights, and address and bytes of one mapping; here is " +
                        Memory::instance().describe(address) + ".");
    }
    for (size_t i = 0; i < count; ++i) {
      if (rights[i].flags != ACL_RT_MEM_ACCESS_FLAGS_READWRITE ||
          rights[i].location.type != ACL_MEM_LOCATION_TYPE_DEVICE) {
        throw Failure(FailureKind::kNotSupported,
                      std::string("vnpu: ") + kName + " with flags " +
                          std::to_string(static_cast<int>(rights[i].flags)) + " for location " +
                          std::to_string(static_cast<int>(rights[i].location.type)) +
                          ": devices read and write all that is mapped, and the host nothing.");
      }
      System::instance().physical(static_cast<int>(rights[i].location.id));
    }
  });
}
