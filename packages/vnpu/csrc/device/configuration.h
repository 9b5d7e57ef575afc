#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace vnpu {

enum class SchedulePolicy { kEager, kThreads, kFuzz };
enum class RaceMode { kOff, kReport, kRaise };

// Settings of this process's virtual NPUs. Read from the environment (names in brackets), once;
// a value that does not parse is an error, never a silent default.
struct Configuration {
  uint32_t device_count = 8;               // [VNPU_DEVICES]
  std::string soc_name = "Ascend910B3";    // [VNPU_SOC]
  size_t memory_bytes = size_t{64} << 30;  // [VNPU_MEMORY], per device: "64GiB", "512MiB", bytes
  SchedulePolicy schedule = SchedulePolicy::kEager;  // [VNPU_SCHEDULE] eager | threads | fuzz:SEED
  uint64_t seed = 0;                                 // of fuzz
  double wait_limit_seconds = 600;  // [VNPU_WAIT_LIMIT] longest wait of the host for the device
  bool compute = true;              // [VNPU_COMPUTE] 1 | 0: 0 launches but does no arithmetic
  RaceMode races = RaceMode::kOff;  // [VNPU_RACES] off | report | raise

  static const Configuration& instance();
  // What instance() would read now, without settling it.
  static Configuration of_environment();
};

}  // namespace vnpu
