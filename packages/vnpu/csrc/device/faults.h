#pragma once

// Points at which a plan (device/fault_plan.h) can inject a fault. Each costs one branch while
// there is no plan.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "device/fault_plan.h"

namespace vnpu::faults {

// True if points are checked: until the first one has read VNPU_FAULTS, and while there is a plan.
extern std::atomic<bool> are_possible;

// Outcomes that are no failure: see reach().
enum class Outcome : uint8_t { kNone, kGone, kTruncated };

// Executes the plan's action at this point, which may throw Failure or std::bad_alloc.
Outcome reach_planned(Kind kind, const char* name, Phase phase);
inline Outcome reach(Kind kind, const char* name = "", Phase phase = Phase::kAny) {
  if (!are_possible.load(std::memory_order_relaxed)) [[likely]]
    return Outcome::kNone;
  return reach_planned(kind, name, phase);
}

// The planned fault of a launch of a task of that name, and its description for reports.
struct PlannedLaunch {
  Action action;
  std::string text;
};
std::optional<PlannedLaunch> next_launch(const char* name);

// Lets it happen.
Outcome perform(const Action& action, Kind kind, const std::string& text);

// The device, by its own number, that this process uses: its rank where the environment has none.
void set_device(int physical_device);

// Reads the plan of the environment; throws if it is invalid.
void open_plan();

// In the file of a process, DIRECTORY/PID.points, in this order.
struct Counts {
  static constexpr size_t kListed = size_t{1} << 20;
  std::atomic<int64_t> rank;
  std::atomic<uint64_t> points;
  std::atomic<uint8_t> kinds[kListed];  // Kind of each point, from the first
};

}  // namespace vnpu::faults
