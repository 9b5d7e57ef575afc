#pragma once

// Times from amounts and rates, exactly and rounded up.

#include <cstdint>

#include "timing/resources.h"

namespace vnpu::timing {

using Wide = unsigned __int128;

inline constexpr int64_t kMillion = 1'000'000;
inline constexpr int64_t kSecond = 1'000'000'000'000;  // ps

inline int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Time for which `amount` occupies a resource that reaches `share` millionths of `rate` per second.
inline Time time_for(Wide amount, int64_t rate, int64_t share) {
  const Wide effective = static_cast<Wide>(rate) * static_cast<Wide>(share);
  return static_cast<Time>((amount * kSecond * kMillion + effective - 1) / effective);
}

}  // namespace vnpu::timing
