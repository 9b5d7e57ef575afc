#include "device/stream_limit.h"

#include <string>

#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu {
namespace {

// Source: hicann/runtime docs/zh/api_ref, aclrtCreateStream: products' numbers of streams.
int most_streams() {
  constexpr int kA2 = 1984, k310P = 1024;
  return Configuration::instance().soc_name.rfind("Ascend310P", 0) == 0 ? k310P : kA2;
}

}  // namespace

StreamLimit& StreamLimit::instance() {
  static auto* const limit = new StreamLimit();  // used by what ends with the process
  return *limit;
}

void StreamLimit::take(int device, int count) {
  const std::lock_guard lock(mutex_);
  int& taken = taken_[device];
  if (Configuration::instance().strict && taken + count > most_streams()) {
    throw Failure(FailureKind::kTooManyStreams,
                  "vnpu: EE1023: " + std::to_string(count) + " more streams on device " +
                      std::to_string(device) + ", where " + std::to_string(taken) + " of " +
                      std::to_string(most_streams()) +
                      " are taken, those of captured graphs among them. Destroy streams or graphs "
                      "first, or capture fewer sizes.");
  }
  taken += count;
}

void StreamLimit::give(int device, int count) {
  const std::lock_guard lock(mutex_);
  taken_[device] -= count;
}

}  // namespace vnpu
