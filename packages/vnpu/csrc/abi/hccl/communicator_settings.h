#pragma once

#include <cstdint>
#include <string>

#include "abi/hccl/hccl_header.h"
#include "collective/time_limits.h"

namespace vnpu::abi {

// The settings that matter here, from the environment and a communicator's configuration. Fields
// beyond the size that the caller states are not read.
struct CommunicatorSettings {
  std::string name;
  TimeLimits limits;
  uint64_t buffer_bytes;  // of one of the two HCCL buffers

  // config: may be null. Throws kInvalidArgument for a value that HCCL does not accept.
  explicit CommunicatorSettings(const HcclCommConfig* config);
};

}  // namespace vnpu::abi
