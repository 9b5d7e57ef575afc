// Devices, contexts, versions, capabilities.

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <regex>
#include <string>

#include "abi/ascendcl/declarations.h"
#include "device/chip.h"
#include "device/configuration.h"
#include "device/faults.h"
#include "device/system.h"

using namespace vnpu;
using abi::guarded;

namespace {

// torch_npu opens libopapi.so by its bare name at the first operator. When vnpu was activated
// inside a process, the loader's search path does not name this directory: load it from here, once.
void load_operator_library() {
  static std::once_flag once;
  std::call_once(once, [] {
    Dl_info self;
    if (::dladdr(reinterpret_cast<void*>(&load_operator_library), &self) == 0) return;
    std::string path = self.dli_fname;
    path.resize(path.find_last_of('/') + 1);
    for (const char* name : {"libnnopbase.so", "libopapi.so"}) {
      if (::dlopen((path + name).c_str(), RTLD_LAZY | RTLD_LOCAL) == nullptr) {
        const char* reason = ::dlerror();
        throw Failure(FailureKind::kInternal, "vnpu: cannot load " + path + name + ": " +
                                                  (reason != nullptr ? reason : "unknown reason"));
      }
    }
  });
}

// The default device of threads that set none, from `{"defaultDevice": {"default_device": "0"}}`;
// -1 if the file names none. Source: documentation of aclInit.
int default_device_of(const char* path) {
  if (path == nullptr || *path == '\0') return -1;
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  static const std::regex device(R"re("default_device"\s*:\s*"(\d{1,3})")re");
  std::smatch found;
  return std::regex_search(text, found, device) ? std::stoi(found[1]) : -1;
}

// A context handle is the device's number + 1.
aclrtContext context_of(int device) { return reinterpret_cast<aclrtContext>(intptr_t{device} + 1); }

}  // namespace

VNPU_ACL(aclInit, (const char* configuration_file)) {
  static std::mutex mutex;
  static bool initialised = false;
  return [&]() -> int {
    std::lock_guard lock(mutex);
    if (initialised) return ACL_ERROR_REPEAT_INITIALIZE;
    const int status = guarded("aclInit", [&] {
      load_operator_library();
      const int device = default_device_of(configuration_file);
      System& system = System::instance();
      if (device >= 0) system.set_default_device(device);
    });
    initialised = status == 0;
    return status;
  }();
}
VNPU_ACL(aclFinalize, ()) { return 0; }

VNPU_ACL(aclrtGetDeviceCount, (uint32_t* count)) {
  return guarded("aclrtGetDeviceCount", [&] { *count = System::device_count(); });
}
VNPU_ACL(aclrtSetDevice, (int32_t device)) {
  return guarded("aclrtSetDevice", [&] {
    faults::set_device(System::instance().physical(device));
    System::current_device() = device;
  });
}
VNPU_ACL(aclrtGetDevice, (int32_t* device)) {
  // Every thread without a device calls this: the expected answer "none" sets no error text.
  *device = System::current_device();
  return *device >= 0 ? 0 : abi::status_of(FailureKind::kDeviceNotSet);
}
VNPU_ACL(aclrtResetDevice, (int32_t device)) {
  return guarded("aclrtResetDevice", [&] {
    System::instance().physical(device);
    System::instance().executor().synchronize_device(device, std::nullopt);
    if (System::current_device() == device) System::current_device() = -1;
  });
}
VNPU_ACL(aclrtSynchronizeDevice, (void)) {
  return guarded("aclrtSynchronizeDevice", [] {
    System& system = System::instance();
    system.executor().synchronize_device(system.require_current_device(), std::nullopt);
  });
}
VNPU_ACL(aclrtSynchronizeDeviceWithTimeout, (int32_t timeout_ms)) {
  return guarded("aclrtSynchronizeDeviceWithTimeout", [&] {
    System& system = System::instance();
    Executor::Limit limit;
    if (timeout_ms >= 0) limit = std::chrono::milliseconds(timeout_ms);
    system.executor().synchronize_device(system.require_current_device(), limit);
  });
}

VNPU_ACL(aclrtGetCurrentContext, (aclrtContext * context)) {
  return guarded("aclrtGetCurrentContext",
                 [&] { *context = context_of(System::instance().require_current_device()); });
}
VNPU_ACL(aclrtSetCurrentContext, (aclrtContext context)) {
  return guarded("aclrtSetCurrentContext", [&] {
    const int device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
    System::instance().physical(device);
    System::current_device() = device;
  });
}
VNPU_ACL(aclrtGetPrimaryCtxState, (int32_t device, uint32_t* flags, int32_t* active)) {
  return guarded("aclrtGetPrimaryCtxState", [&] {
    System::instance().physical(device);
    if (flags != nullptr) *flags = 0;
    if (active != nullptr) *active = System::current_device() == device ? 1 : 0;
  });
}

VNPU_ACL(aclrtDeviceCanAccessPeer, (int32_t* can, int32_t device, int32_t peer)) {
  return guarded("aclrtDeviceCanAccessPeer", [&] {
    System::instance().physical(device);
    System::instance().physical(peer);
    *can = 1;
  });
}
VNPU_ACL(aclrtDeviceEnablePeerAccess, (int32_t peer, uint32_t)) {
  return guarded("aclrtDeviceEnablePeerAccess", [&] { System::instance().physical(peer); });
}
VNPU_ACL(aclrtGetRunMode, (aclrtRunMode * mode)) {
  return guarded("aclrtGetRunMode", [&] {
    if (mode == nullptr) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: aclrtGetRunMode has nowhere to write to.");
    }
    *mode = ACL_HOST;  // programs run beside the device
  });
}
VNPU_ACL(aclrtGetLogicDevIdByUserDevId, (const int32_t user, int32_t* const logic)) {
  return guarded("aclrtGetLogicDevIdByUserDevId",
                 [&] { *logic = System::instance().physical(user); });
}
VNPU_ACL(aclrtDeviceGetBareTgid, (int32_t* pid)) {
  *pid = ::getpid();
  return 0;
}
VNPU_ACL(aclrtDeviceGetUuid, (int32_t device, aclrtUuid* uuid)) {
  return guarded("aclrtDeviceGetUuid", [&] {
    std::memset(uuid->bytes, 0, sizeof(uuid->bytes));
    std::memcpy(uuid->bytes, "vnpu", 4);
    uuid->bytes[15] = static_cast<char>(System::instance().physical(device));
  });
}

extern "C" __attribute__((visibility("default"))) const char* aclrtGetSocName() {
  try {
    return Configuration::instance().soc_name.c_str();
  } catch (...) {
    abi::report_exception("aclrtGetSocName");
    return nullptr;
  }
}
VNPU_ACL(aclGetDeviceCapability, (uint32_t device, aclDeviceInfo info, int64_t* value)) {
  return guarded("aclGetDeviceCapability", [&] {
    System::instance().physical(static_cast<int>(device));
    switch (info) {
      case ACL_DEVICE_INFO_AI_CORE_NUM: *value = Configuration::instance().chip->cube_cores; return;
      case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
        *value = Configuration::instance().chip->vector_cores;
        return;
      case ACL_DEVICE_INFO_L2_SIZE: *value = Configuration::instance().chip->l2_bytes; return;
      default: break;
    }
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: device capability " + std::to_string(info) + " is not known.");
  });
}
VNPU_ACL(aclrtGetDeviceUtilizationRate, (int32_t device, aclrtUtilizationInfo* info)) {
  return guarded("aclrtGetDeviceUtilizationRate", [&] {
    System::instance().physical(device);
    *info = {};  // the virtual device keeps no wall-clock utilisation
  });
}
// --- versions and attributes -----------------------------------------------------------------

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
VNPU_ACL(aclsysGetCANNVersion, (aclCANNPackageName, aclCANNPackageVersion* version)) {
  // "8.5.0": one digit each. Called while torch_npu is imported, and therefore fixes no settings.
  const char* const number = Configuration::of_environment().cann_version();
  std::memset(version, 0, sizeof(*version));
  std::strcpy(version->version, number);
  version->majorVersion[0] = number[0];
  version->minorVersion[0] = number[2];
  version->releaseVersion[0] = number[4];
  return 0;
}
#pragma GCC diagnostic pop
VNPU_ACL(aclsysGetVersionStr, (char*, char* version)) {
  std::strcpy(version, Configuration::of_environment().cann_version());
  return 0;
}
VNPU_ACL(aclGetCannAttributeList, (const aclCannAttr** list, size_t* count)) {
  static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16,
                                    ACL_CANN_ATTR_JIT_COMPILE};
  *list = all;
  *count = 3;
  return 0;
}
VNPU_ACL(aclGetCannAttribute, (aclCannAttr, int32_t* value)) {
  *value = 1;
  return 0;
}
VNPU_ACL(aclrtSetDeviceSatMode, (aclrtFloatOverflowMode mode)) {
  return guarded("aclrtSetDeviceSatMode", [&] {
    if (mode == ACL_RT_OVERFLOW_MODE_INFNAN) return;
    throw Failure(FailureKind::kNotSupported,
                  "vnpu: mode " + std::to_string(mode) +
                      ": results that overflow become infinities here, and never the largest "
                      "number. Leave the device in ACL_RT_OVERFLOW_MODE_INFNAN.");
  });
}
VNPU_ACL(aclrtSetOpExecuteTimeOut, (uint32_t)) { return 0; }
VNPU_ACL(aclrtSetOpExecuteTimeOutV2, (uint64_t timeout_us, uint64_t* actual_us)) {
  if (actual_us != nullptr) *actual_us = timeout_us;
  return 0;
}
VNPU_ACL(aclrtSetOpWaitTimeout, (uint32_t)) { return 0; }
