#pragma once

// Resources that tasks of one device share, and a task's demand for them.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace vnpu::timing {

using Time = int64_t;  // picoseconds of the modelled clock, which begins at 0

enum class Resource : uint8_t {
  kCube,
  kVector,
  kHbm,
  kL2,
  kAiCpu,
  kCopyIn,   // host to device
  kCopyOut,  // device to host
  kLinks0,   // to the ranks of the innermost tier of the topology
  kLinks1,
  kLinks2,
};
inline constexpr size_t kResources = 10;
inline constexpr size_t kTiers = 3;  // of links

constexpr size_t index_of(Resource resource) { return static_cast<size_t>(resource); }
constexpr Resource links(size_t tier) {
  return static_cast<Resource>(index_of(Resource::kLinks0) + tier);
}
const char* name_of(Resource resource);

// Time for which a task would keep each resource busy if it had all of it.
using Busy = std::array<Time, kResources>;

// A part of a task: first a time without shared resources (launching cores, the latency of a link),
// then work that uses several resources together, at the speed of the slowest.
struct Phase {
  Time fixed = 0;
  Busy busy = {};
  Time least = 0;  // minimum time of the work, if the task may use only some cores

  // Time of the work if the task has the device for itself.
  Time work() const { return std::max(least, *std::max_element(busy.begin(), busy.end())); }
  Time alone() const { return fixed + work(); }
};

}  // namespace vnpu::timing
