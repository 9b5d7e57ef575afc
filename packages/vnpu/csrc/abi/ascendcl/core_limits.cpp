// Limits on the cores that operators use: of this process on a device, and of streams. Accepted
// values and precedence follow hicann/runtime's api_impl.cc.

#include <string>

#include "abi/ascendcl/declarations.h"
#include "device/core_limits.h"
#include "device/failure.h"
#include "device/system.h"

using namespace vnpu;
using abi::guarded;

namespace {

// A device that exists, as programs number it.
int known(int device) {
  System::instance().physical(device);
  return device;
}

CoreKind kind_of(aclrtDevResLimitType type) {
  switch (type) {
    case ACL_RT_DEV_RES_CUBE_CORE: return CoreKind::kCube;
    case ACL_RT_DEV_RES_VECTOR_CORE: return CoreKind::kVector;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: resource type " + std::to_string(static_cast<int>(type)) +
                    " of a limit: expected ACL_RT_DEV_RES_CUBE_CORE (0) or "
                    "ACL_RT_DEV_RES_VECTOR_CORE (1).");
}

void give(uint32_t* value, uint32_t cores) {
  if (value == nullptr) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: the limit was asked for with a null pointer for its value.");
  }
  *value = cores;
}

}  // namespace

VNPU_ACL(aclrtGetDeviceResLimit, (int32_t device, aclrtDevResLimitType type, uint32_t* value)) {
  return guarded("aclrtGetDeviceResLimit",
                 [&] { give(value, core_limits::of_process(known(device), kind_of(type))); });
}
VNPU_ACL(aclrtSetDeviceResLimit, (int32_t device, aclrtDevResLimitType type, uint32_t value)) {
  return guarded("aclrtSetDeviceResLimit",
                 [&] { core_limits::of_process(known(device)).set(kind_of(type), value); });
}
VNPU_ACL(aclrtResetDeviceResLimit, (int32_t device)) {
  return guarded("aclrtResetDeviceResLimit",
                 [&] { core_limits::of_process(known(device)).reset(); });
}

VNPU_ACL(aclrtGetStreamResLimit, (aclrtStream stream, aclrtDevResLimitType type, uint32_t* value)) {
  return guarded("aclrtGetStreamResLimit", [&] {
    give(value, core_limits::of_stream(*abi::stream_of(stream), kind_of(type)));
  });
}
VNPU_ACL(aclrtSetStreamResLimit, (aclrtStream stream, aclrtDevResLimitType type, uint32_t value)) {
  return guarded("aclrtSetStreamResLimit",
                 [&] { abi::stream_of(stream)->cores.set(kind_of(type), value); });
}
VNPU_ACL(aclrtResetStreamResLimit, (aclrtStream stream)) {
  return guarded("aclrtResetStreamResLimit", [&] { abi::stream_of(stream)->cores.reset(); });
}

VNPU_ACL(aclrtUseStreamResInCurrentThread, (aclrtStream stream)) {
  return guarded("aclrtUseStreamResInCurrentThread",
                 [&] { core_limits::use_in_thread(abi::stream_of(stream)); });
}
VNPU_ACL(aclrtUnuseStreamResInCurrentThread, (aclrtStream stream)) {
  return guarded("aclrtUnuseStreamResInCurrentThread", [&] {
    // Has no effect for another stream, as in the runtime.
    if (core_limits::used_in_thread() == abi::stream_of(stream)) {
      core_limits::use_in_thread(nullptr);
    }
  });
}
VNPU_ACL(aclrtGetResInCurrentThread, (aclrtDevResLimitType type, uint32_t* value)) {
  return guarded("aclrtGetResInCurrentThread", [&] {
    const int device = System::instance().require_current_device();
    give(value, core_limits::of_thread(device, kind_of(type)));
  });
}
