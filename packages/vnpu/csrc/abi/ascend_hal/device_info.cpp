// libascend_hal, the driver's library: torch_npu asks it for the frequency of the chip's clock, to
// convert a profiler's time stamps. A virtual NPU has only the host's clock. Source: ascend_hal.h
// of the driver, halGetAPIVersion and halGetDeviceInfo.

#include <cstdint>

#define VNPU_HAL(NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) int NAME PARAMETERS

namespace {

enum Status : int { kSuccess = 0, kInvalidValue = 3, kNotSupported = 0xfffe };

// The first version that reports frequencies: major, minor and patch, a byte each.
constexpr int32_t kApiVersion = 0x071905;

}  // namespace

VNPU_HAL(halGetAPIVersion, (int32_t* version)) {
  if (version == nullptr) return kInvalidValue;
  *version = kApiVersion;
  return kSuccess;
}

VNPU_HAL(halGetDeviceInfo,
         (uint32_t /*device*/, int32_t /*module*/, int32_t /*info*/, int64_t* /*value*/)) {
  return kNotSupported;
}
