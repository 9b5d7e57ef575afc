#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/chip.h"

namespace vnpu {

enum class SchedulePolicy { kEager, kThreads, kFuzz };
enum class RaceMode { kOff, kReport, kRaise };

// Settings of this process's virtual NPUs. Read from the environment (names in brackets), once;
// a value that does not parse is an error, never a silent default.
struct Configuration {
  uint32_t device_count = 8;             // [VNPU_DEVICES]
  std::string soc_name = "Ascend910B3";  // [VNPU_SOC], as the runtime reports it
  // [VNPU_SOC] reference | reference:NAME: a chip that takes operands of any dtype and size
  bool is_reference = false;
  const Chip* chip = nullptr;            // of the SoC name
  CannRelease cann = CannRelease::k8_5;  // [VNPU_CANN] 8.3 | 8.5 | 9.0; else the chip's
  bool strict = true;       // [VNPU_STRICT] 1 | 0: 0 does not check the documents' constraints
  size_t memory_bytes = 0;  // [VNPU_MEMORY], per device: "64GiB", "512MiB", bytes; else the chip's
  SchedulePolicy schedule = SchedulePolicy::kEager;  // [VNPU_SCHEDULE] eager | threads | fuzz:SEED
  uint64_t seed = 0;                                 // of fuzz
  double wait_limit_seconds = 600;  // [VNPU_WAIT_LIMIT] longest wait of the host for the device
  bool compute = true;              // [VNPU_COMPUTE] 1 | 0: 0 launches but does no arithmetic
  RaceMode races = RaceMode::kOff;  // [VNPU_RACES] off | report | raise

  static const Configuration& instance();
  // The configuration of the current environment, as instance() would read it; does not fix it for
  // the process.
  static Configuration of_environment();

  // The release's number as programs read it: "8.5.0".
  const char* cann_version() const;
};

}  // namespace vnpu
