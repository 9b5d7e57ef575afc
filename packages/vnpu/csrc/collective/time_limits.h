#pragma once

#include <chrono>

namespace vnpu {

// Time limits of waits among ranks of a group, from the variables that HCCL reads.
struct TimeLimits {
  std::chrono::seconds connect{120};   // [HCCL_CONNECT_TIMEOUT] for all ranks to join the group
  std::chrono::seconds execute{1836};  // [HCCL_EXEC_TIMEOUT] for one step of a collective; 0: none

  static TimeLimits from_environment();
};

}  // namespace vnpu
