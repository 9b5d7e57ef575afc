#include "collective/partition.h"

#include <algorithm>
#include <numeric>

#include "device/checked_sizes.h"

namespace vnpu {

Partition Partition::equal(uint32_t ranks, uint64_t count) {
  Partition parts{std::vector<uint64_t>(ranks, count), std::vector<uint64_t>(ranks)};
  for (uint32_t r = 0; r < ranks; ++r) {
    parts.offsets[r] = checked_multiply<uint64_t>(r, count, "the offset of a rank's part");
  }
  return parts;
}

uint64_t total(const Partition& parts) {
  return std::accumulate(
      parts.counts.begin(), parts.counts.end(), uint64_t{0},
      [](uint64_t sum, uint64_t count) { return checked_add(sum, count, "a sum of counts"); });
}

uint64_t extent(const Partition& parts) {
  uint64_t end = 0;
  for (size_t r = 0; r < parts.counts.size(); ++r) {
    if (parts.counts[r] == 0) continue;
    end = std::max(end, checked_add(parts.offsets[r], parts.counts[r], "the end of a rank's part"));
  }
  return end;
}

size_t bytes_of(uint64_t count, ElementType type) {
  return checked_multiply<size_t>(count, size_of(type), "the size of a collective's buffer");
}

Partition in_bytes(Partition parts, ElementType type) {
  for (size_t r = 0; r < parts.counts.size(); ++r) {
    // The offset of an empty part is undefined.
    parts.offsets[r] = parts.counts[r] == 0 ? 0 : bytes_of(parts.offsets[r], type);
    parts.counts[r] = bytes_of(parts.counts[r], type);
  }
  return parts;
}

}  // namespace vnpu
