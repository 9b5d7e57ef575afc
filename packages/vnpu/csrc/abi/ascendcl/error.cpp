// Errors: of a thread's calls, and of devices.

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "device/device_errors.h"

using namespace vnpu;
using abi::guarded;

namespace {

// By the status of the task that failed: rt_error_codes.h, aclrtErrorType.
aclrtErrorType type_of(int status) {
  switch (status) {
    case 507014:  // AI core timed out
    case 507015:  // AI core exception
    case 507016:  // AI core trap exception
    case 507034:  // vector core timed out
    case 507035:  // vector core exception
    case 507036:  // vector core trap exception
      return ACL_RT_ERROR_AICORE;
    case 507053:  // device memory error
    case 507054:  // HBM error of several bits
      return ACL_RT_ERROR_MEMORY;
    case 507056:  // link error
    case 507057:  // suspect remote error
      return ACL_RT_ERROR_LINK;
    default: return ACL_RT_ERROR_OTHERS;
  }
}

aclrtMemUceInfo info_of(const MemoryRange& range) {
  aclrtMemUceInfo info = {};
  info.addr = reinterpret_cast<void*>(range.begin);
  info.len = range.end - range.begin;
  return info;
}

void repair(int32_t device, const aclrtMemUceInfo* infos, size_t count) {
  std::vector<MemoryRange> ranges;
  for (const aclrtMemUceInfo& info : std::span(infos, count)) {
    const auto begin = reinterpret_cast<uintptr_t>(info.addr);
    ranges.push_back({begin, begin + info.len});
  }
  DeviceErrors::instance().repair(device, ranges);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* aclGetRecentErrMsg() {
  return abi::recent_error();
}
VNPU_ACL(aclrtPeekAtLastError, (aclrtLastErrLevel)) { return abi::peek_at_last_status(); }
VNPU_ACL(aclrtGetLastError, (aclrtLastErrLevel)) { return abi::take_last_status(); }

VNPU_ACL(aclrtGetErrorVerbose, (int32_t device, aclrtErrorInfo* info)) {
  return guarded("aclrtGetErrorVerbose", [&] {
    System::instance().physical(device);
    *info = {};
    const std::optional<DeviceErrors::Error> error = DeviceErrors::instance().newest(device);
    if (!error.has_value()) return;
    info->errorType = type_of(abi::status_of(error->kind));
    if (info->errorType == ACL_RT_ERROR_AICORE) {
      info->hasDetail = 1;
      info->detail.aicoreErrType = ACL_RT_AICORE_ERROR_UNKNOWN;
    }
    if (info->errorType != ACL_RT_ERROR_MEMORY) return;
    const std::vector<MemoryRange> bad = DeviceErrors::instance().bad_memory(device);
    info->tryRepair = info->hasDetail = 1;
    info->detail.uceInfo = {};
    info->detail.uceInfo.arraySize = std::min<size_t>(bad.size(), ACL_RT_MEM_UCE_INFO_MAX_NUM);
    std::transform(bad.begin(), bad.begin() + info->detail.uceInfo.arraySize,
                   info->detail.uceInfo.memUceInfoArray, info_of);
  });
}
VNPU_ACL(aclrtRepairError, (int32_t device, const aclrtErrorInfo* info)) {
  return guarded("aclrtRepairError", [&] {
    System::instance().physical(device);
    if (info->errorType != ACL_RT_ERROR_MEMORY) {
      throw Failure(
          FailureKind::kNotSupported,
          "vnpu: only errors of device memory can be repaired (type 1), not one of type " +
              std::to_string(info->errorType) + ". Start the process again.");
    }
    const aclrtMemUceInfoArray& memory = info->detail.uceInfo;
    repair(device, memory.memUceInfoArray,
           std::min<size_t>(memory.arraySize, ACL_RT_MEM_UCE_INFO_MAX_NUM));
  });
}
VNPU_ACL(aclrtGetMemUceInfo, (int32_t device, aclrtMemUceInfo* infos, size_t most, size_t* count)) {
  return guarded("aclrtGetMemUceInfo", [&] {
    System::instance().physical(device);
    const std::vector<MemoryRange> bad = DeviceErrors::instance().bad_memory(device);
    *count = std::min(bad.size(), most);
    std::transform(bad.begin(), bad.begin() + static_cast<ptrdiff_t>(*count), infos, info_of);
  });
}
VNPU_ACL(aclrtMemUceRepair, (int32_t device, aclrtMemUceInfo* infos, size_t count)) {
  return guarded("aclrtMemUceRepair", [&] {
    System::instance().physical(device);
    repair(device, infos, count);
  });
}

extern "C" __attribute__((visibility("default"))) void aclAppLog(aclLogLevel, const char*,
                                                                 const char*, uint32_t, const char*,
                                                                 ...) {
  // torch_npu mirrors its own log here; it already prints what matters.
}
