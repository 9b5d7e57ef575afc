#include "device/address_gaps.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "device/checked_sizes.h"

namespace vnpu {

void* AddressGaps::carve(uintptr_t start, size_t bytes, size_t alignment) {
  // The first place in a gap, from an address on; 0 if the gap has none.
  const auto place = [&](const std::pair<const uintptr_t, size_t>& gap, uintptr_t from) {
    const uintptr_t begin = round_up(std::max(gap.first, from), alignment);
    const uintptr_t end = gap.first + gap.second;
    return begin < end && end - begin >= bytes ? begin : 0;
  };
  const auto take = [&](std::map<uintptr_t, size_t>::iterator gap, uintptr_t begin) {
    const auto [gap_begin, gap_bytes] = *gap;
    gaps_.erase(gap);
    if (begin > gap_begin) gaps_.emplace(gap_begin, begin - gap_begin);
    const size_t rest = gap_begin + gap_bytes - begin - bytes;
    if (rest > 0) gaps_.emplace(begin + bytes, rest);
    return reinterpret_cast<void*>(begin);
  };
  const auto after = gaps_.lower_bound(start);
  if (after != gaps_.begin()) {
    const auto around = std::prev(after);
    if (const uintptr_t begin = place(*around, start)) return take(around, begin);
  }
  for (auto gap = after; gap != gaps_.end(); ++gap) {
    if (const uintptr_t begin = place(*gap, 0)) return take(gap, begin);
  }
  for (auto gap = gaps_.begin(); gap != after; ++gap) {
    if (const uintptr_t begin = place(*gap, 0)) return take(gap, begin);
  }
  return nullptr;
}

void AddressGaps::give_back(uintptr_t begin, size_t bytes) {
  auto next = gaps_.lower_bound(begin);
  if (next != gaps_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      gaps_.erase(before);
    }
  }
  if (next != gaps_.end() && begin + bytes == next->first) {
    bytes += next->second;
    gaps_.erase(next);
  }
  gaps_.emplace(begin, bytes);
}

}  // namespace vnpu
