#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/element.h"

namespace vnpu {

// Division of a buffer among ranks, in elements: rank r has counts[r] from offsets[r] on.
struct Partition {
  std::vector<uint64_t> counts;
  std::vector<uint64_t> offsets;

  static Partition equal(uint32_t ranks, uint64_t count);
};

// All of these throw kInvalidArgument for what does not fit into 64 bits.
uint64_t total(const Partition& parts);
// Elements from the start of the buffer to the end of the last part.
uint64_t extent(const Partition& parts);
size_t bytes_of(uint64_t count, ElementType type);
// The same partition in bytes.
Partition in_bytes(Partition parts, ElementType type);

}  // namespace vnpu
