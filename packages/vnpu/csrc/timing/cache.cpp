#include "timing/cache.h"

#include <algorithm>
#include <iterator>

namespace vnpu::timing {

void Cache::drop(std::map<uintptr_t, Range>::iterator range) {
  const auto [first, last] = ages_.equal_range(range->second.used);
  ages_.erase(
      std::find_if(first, last, [&](const auto& age) { return age.second == range->first; }));
  bytes_ -= static_cast<int64_t>(range->second.end - range->first);
  ranges_.erase(range);
}

void Cache::put(uintptr_t begin, Range range) {
  bytes_ += static_cast<int64_t>(range.end - begin);
  ages_.emplace(range.used, begin);
  ranges_.emplace(begin, range);
}

int64_t Cache::take(uintptr_t begin, uintptr_t end) {
  int64_t taken = 0;
  auto range = ranges_.upper_bound(begin);
  if (range != ranges_.begin() && std::prev(range)->second.end > begin) --range;
  while (range != ranges_.end() && range->first < end) {
    const uintptr_t first = range->first;
    const Range whole = range->second;
    const auto next = std::next(range);
    drop(range);
    if (first < begin) put(first, {begin, whole.used});
    if (whole.end > end) put(end, whole);
    taken += static_cast<int64_t>(std::min(whole.end, end) - std::max(first, begin));
    range = next;
  }
  return taken;
}

int64_t Cache::use(uintptr_t begin, uintptr_t end) {
  const auto bytes = static_cast<int64_t>(end - begin);
  ++uses_;
  if (bytes > capacity_) {
    ranges_.clear();
    ages_.clear();
    bytes_ = 0;
    return 0;
  }
  const int64_t there = take(begin, end);
  if (bytes > 0) put(begin, {end, uses_});
  while (bytes_ > capacity_) drop(ranges_.find(ages_.begin()->second));
  return there;
}

}  // namespace vnpu::timing
