#pragma once

#include <cstdint>
#include <vector>

#include "timing/resources.h"

namespace vnpu::timing {

// Fractions, of speed and of resources, are integers: this is 1.
inline constexpr uint64_t kWhole = uint64_t{1} << 32;

// Share of each resource that a task uses at full speed.
using Shares = std::array<uint64_t, kResources>;

// A task uses all of its busiest resource, unless its work is limited otherwise. Rounded up.
Shares shares_of(const Phase& phase);

// The speeds of tasks that run together, in the order of `tasks`: max-min fair. All speeds rise
// together from 0 until a resource is used up; tasks that use it keep that speed, the others
// continue to rise, at most to kWhole. Integers, rounded down, give the same results on every
// machine.
void speeds_of(const std::vector<const Shares*>& tasks, std::vector<uint64_t>& speeds);

}  // namespace vnpu::timing
