// Address ranges that programs reserve, physical memory mapped into them, and its export to other
// processes.

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

// A handle is a number, not an address, so that a freed handle is detected instead of dereferenced.
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
