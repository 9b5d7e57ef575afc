#include "timing/cache.h"

#include <algorithm>
#include <iterator>

namespace vnpu::timing {

void Cache::Found::await(uint64_t arrival) {
  if (arrival == 0) return;
  if (std::find(arrivals.begin(), arrivals.end(), arrival) == arrivals.end()) {
    arrivals.push_back(arrival);
  }
}

void Cache::drop(Ranges::const_iterator range) {
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

void Cache::append(uintptr_t begin, Range range) {
  const auto next = ranges_.lower_bound(begin);
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    const Range alike = before->second;
    if (alike.end == begin && alike.used == range.used && alike.arrival == range.arrival &&
        alike.is_touched == range.is_touched) {
      begin = before->first;
      drop(before);
    }
  }
  put(begin, range);
}

Cache::Ranges::const_iterator Cache::after(uintptr_t address) const {
  const auto range = ranges_.upper_bound(address);
  if (range == ranges_.begin()) return range;
  const auto before = std::prev(range);
  return before->second.end > address ? before : range;
}

void Cache::cut(uintptr_t address) {
  const auto range = after(address);
  if (range == ranges_.end() || range->first >= address) return;
  const uintptr_t first = range->first;
  const Range whole = range->second;
  drop(range);
  put(first, {address, whole.used, whole.arrival, whole.is_touched});
  put(address, whole);
}

void Cache::make_room(uintptr_t next, uintptr_t end) {
  while (bytes_ > capacity_) {
    const auto oldest = ranges_.find(ages_.begin()->second);
    const auto [begin, range] = *oldest;
    const auto size = static_cast<int64_t>(range.end - begin);
    const int64_t over = bytes_ - capacity_;
    drop(oldest);
    // If the range that is used next is evicted in part, all of it misses: each byte that is loaded
    // again evicts another byte of it.
    const bool is_next = begin == next && range.end <= end;
    if (size > over && !is_next) put(begin + static_cast<uintptr_t>(over), range);
  }
}

Cache::Found Cache::use(uintptr_t begin, uintptr_t end, uint64_t arrival, bool is_touched) {
  Found found;
  ++uses_;
  cut(begin);
  cut(end);
  for (uintptr_t next = begin; next < end;) {
    const auto range = after(next);
    const bool is_there = range != ranges_.end() && range->first == next;
    if (is_there) {
      const Range whole = range->second;
      found.bytes += static_cast<int64_t>(whole.end - next);
      found.await(whole.arrival);
      drop(range);
      append(next, {whole.end, uses_, arrival == 0 ? 0 : whole.arrival, is_touched});
      next = whole.end;
      continue;
    }
    const uintptr_t stop = range == ranges_.end() ? end : std::min(range->first, end);
    const auto most = static_cast<uintptr_t>(capacity_);
    const uintptr_t kept = stop - next > most ? stop - most : next;
    if (kept < stop) append(kept, {stop, uses_, arrival, is_touched});
    make_room(stop, end);
    next = stop;
  }
  return found;
}

Cache::Found Cache::use(uintptr_t begin, uintptr_t end) { return use(begin, end, 0, false); }

Cache::Found Cache::find(uintptr_t begin, uintptr_t end) const {
  Found found;
  for (auto range = after(begin); range != ranges_.end() && range->first < end; ++range) {
    const Range& each = range->second;
    const auto bytes =
        static_cast<int64_t>(std::min(each.end, end) - std::max(range->first, begin));
    found.bytes += bytes;
    if (each.is_touched) found.touched += bytes;
    found.await(each.arrival);
  }
  return found;
}

int64_t Cache::bring(uintptr_t begin, uintptr_t end, uint64_t arrival) {
  return use(begin, end, arrival, false).bytes;
}

void Cache::forget(uintptr_t begin, uintptr_t end) {
  cut(begin);
  cut(end);
  for (auto range = ranges_.lower_bound(begin); range != ranges_.end() && range->first < end;) {
    const auto next = std::next(range);
    drop(range);
    range = next;
  }
}

}  // namespace vnpu::timing
