#pragma once

#include "device/task.h"

namespace vnpu::race {

// True if two accesses have a byte in common. Interleaved strided tensors without a common element
// have none.
bool overlap(const Access& a, const Access& b);

}  // namespace vnpu::race
