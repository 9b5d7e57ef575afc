#pragma once

#include <cstdint>

#include "device/task.h"

namespace vnpu {

// Bytes of the elements that a task touches; each access counts. Zero unless accesses are
// collected.
struct Traffic {
  uint64_t read = 0;
  uint64_t written = 0;
};

Traffic traffic_of(const Task& task);
uint64_t bytes_of(const Access& access);

}  // namespace vnpu
