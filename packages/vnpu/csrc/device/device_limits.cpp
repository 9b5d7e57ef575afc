#include "device/device_limits.h"

#include <string>

#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu {
namespace {

using Kind = DeviceLimits::Kind;

int most(Kind kind) {
  const Chip& chip = *Configuration::instance().chip;
  return kind == Kind::kStreams ? chip.streams : chip.events;
}

[[noreturn]] void refuse(Kind kind, int device, int count, int taken) {
  const bool is_stream = kind == Kind::kStreams;
  const std::string noun = is_stream ? "streams" : "events";
  throw Failure(is_stream ? FailureKind::kTooManyStreams : FailureKind::kTooManyEvents,
                "vnpu: EE1023: " + std::to_string(count) + " more " + noun + " on device " +
                    std::to_string(device) + ", where " + std::to_string(taken) + " of " +
                    std::to_string(most(kind)) + " are taken" +
                    ", those of captured graphs among them. Destroy " +
                    (is_stream ? "streams or graphs first, or capture fewer sizes."
                               : "events or graphs first, or record the same events again."));
}

}  // namespace

DeviceLimits& DeviceLimits::instance() {
  static auto* const limits = new DeviceLimits();  // used by what ends with the process
  return *limits;
}

void DeviceLimits::take(Kind kind, int device, int count) {
  const std::lock_guard lock(mutex_);
  int& taken = taken_[device].of(kind);
  if (Configuration::instance().strict && taken + count > most(kind)) {
    refuse(kind, device, count, taken);
  }
  taken += count;
}

void DeviceLimits::give(Kind kind, int device, int count) {
  const std::lock_guard lock(mutex_);
  taken_[device].of(kind) -= count;
}

bool DeviceLimits::has_room(Kind kind, int device) {
  const std::lock_guard lock(mutex_);
  return !Configuration::instance().strict || taken_[device].of(kind) < most(kind);
}

}  // namespace vnpu
