#include "triton/access_log.h"

#include <algorithm>
#include <tuple>

namespace vnpu::triton {
namespace {

// Beyond this many the nearest ranges of a line become one.
constexpr size_t kMostRanges = 1024;

using Entry = AccessLog::Entry;

bool is_same_line(const Entry& a, const Entry& b) {
  return a.instruction == b.instruction && a.write == b.write;
}

// Merges entries of one line whose gap is at most `gap`; entries are sorted by line and begin.
std::vector<Entry> merged(const std::vector<Entry>& sorted, uintptr_t gap) {
  std::vector<Entry> result;
  for (const Entry& each : sorted) {
    if (!result.empty() && is_same_line(result.back(), each) &&
        each.begin <= result.back().end + gap) {
      result.back().end = std::max(result.back().end, each.end);
    } else {
      result.push_back(each);
    }
  }
  return result;
}

Access access_of(const Entry& entry, const std::array<uint32_t, 3>& grid) {
  Access access{entry.begin, entry.end, entry.write};
  access.line = entry.instruction->place;
  std::ranges::copy(coordinates(entry.program, grid), access.program);
  return access;
}

// Writes that can be searched by address.
class Writes {
 public:
  void add(const Entry& entry) {
    entries_.push_back(entry);
    longest_ = std::max(longest_, entry.end - entry.begin);
  }
  void sort() { std::ranges::sort(entries_, {}, &Entry::begin); }
  // A write by another program of a byte of this entry.
  const Entry* of_another(const Entry& entry) const {
    const uintptr_t from = entry.begin > longest_ ? entry.begin - longest_ : 0;
    auto each = std::ranges::lower_bound(entries_, from, {}, &Entry::begin);
    for (; each != entries_.end() && each->begin < entry.end; ++each) {
      if (each->end > entry.begin && each->program != entry.program) return &*each;
    }
    return nullptr;
  }

 private:
  std::vector<Entry> entries_;
  uintptr_t longest_ = 0;
};

}  // namespace

std::array<uint32_t, 3> coordinates(uint32_t program, const std::array<uint32_t, 3>& grid) {
  return {program % grid[0], program / grid[0] % grid[1], program / grid[0] / grid[1]};
}

std::vector<Access> AccessLog::accesses(const std::array<uint32_t, 3>& grid) const {
  std::vector<Entry> ranges = entries_;
  std::ranges::sort(ranges, {}, [](const Entry& each) {
    return std::tuple(each.instruction, each.write, each.begin, each.end);
  });
  ranges = merged(ranges, 0);
  for (uintptr_t gap = 64; ranges.size() > kMostRanges; gap *= 4) ranges = merged(ranges, gap);
  std::vector<Access> result;
  for (size_t i = 0; i < ranges.size();) {
    Access access = access_of(ranges[i], grid);
    const auto bytes = static_cast<int64_t>(ranges[i].end - ranges[i].begin);
    int64_t distance = 0;
    size_t next = i + 1;
    for (; next < ranges.size() && is_same_line(ranges[i], ranges[next]); ++next) {
      const auto step = static_cast<int64_t>(ranges[next].begin - ranges[next - 1].begin);
      if (static_cast<int64_t>(ranges[next].end - ranges[next].begin) != bytes) break;
      if (distance != 0 && step != distance) break;
      distance = step;
    }
    if (next - i > 2) {
      access.end = ranges[next - 1].end;
      access.layout.dims = 2;
      access.layout.item = 1;
      access.layout.sizes[0] = static_cast<int64_t>(next - i);
      access.layout.strides[0] = distance;
      access.layout.sizes[1] = bytes;
      access.layout.strides[1] = 1;
      i = next;
    } else {
      ++i;
    }
    result.push_back(access);
  }
  return result;
}

std::optional<AccessLog::Conflict> AccessLog::conflict() const {
  Writes plain;
  Writes atomic;
  for (const Entry& each : entries_) {
    if (each.write && each.changes) (each.is_atomic ? atomic : plain).add(each);
  }
  plain.sort();
  atomic.sort();
  for (const Entry& each : entries_) {
    if (each.write && !each.changes) continue;
    if (const Entry* other = plain.of_another(each)) return Conflict{*other, each};
    if (each.is_atomic) continue;
    if (const Entry* other = atomic.of_another(each)) return Conflict{*other, each};
  }
  return std::nullopt;
}

}  // namespace vnpu::triton
