#pragma once

#include "device/task.h"

namespace vnpu::race {

// True if two accesses have a byte in common. Strided tensors that interleave in one range without
// sharing an element have none.
bool overlap(const Access& a, const Access& b);

}  // namespace vnpu::race
