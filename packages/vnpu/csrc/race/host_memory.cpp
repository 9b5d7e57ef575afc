#include "race/host_memory.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string_view>

namespace vnpu::race {
namespace {

size_t contents_of(const HostMemory::Range& range) {
  return std::hash<std::string_view>{}(
      {reinterpret_cast<const char*>(range.begin), range.end - range.begin});
}

bool disturbed(const HostMemory::Read& read) { return contents_of(read.range) != read.contents; }

bool known(const Launch& launch, const VectorClock& host) {
  return launch.number <= host.of(static_cast<size_t>(launch.stream));
}

}  // namespace

template <class Which>
std::vector<HostMemory::Read> HostMemory::take_if(const Which& which) {
  const auto taken = std::stable_partition(reads_.begin(), reads_.end(),
                                           [&](const Read& read) { return !which(read); });
  std::vector<Read> result(std::make_move_iterator(taken), std::make_move_iterator(reads_.end()));
  reads_.erase(taken, reads_.end());
  return result;
}

void HostMemory::read(const Range& range, const LaunchPtr& launch) {
  for (const Write& write : writes_) {
    if (write.range.meets(range)) return;  // the write may occur at any time
  }
  // A newer read of the range by the same stream, of the same contents, replaces the older one.
  std::erase_if(reads_, [&](const Read& earlier) {
    return earlier.launch->stream == launch->stream && earlier.range.begin == range.begin &&
           earlier.range.end == range.end;
  });
  reads_.push_back({range, launch, contents_of(range)});
}

void HostMemory::written(const Range& range, const LaunchPtr& launch) {
  take(range);
  writes_.push_back({range, launch});
}

std::vector<HostMemory::Read> HostMemory::take_finished(const VectorClock& host) {
  std::erase_if(writes_, [&](const Write& write) { return known(*write.launch, host); });
  std::vector<Read> finished = take_if([&](const Read& read) { return known(*read.launch, host); });
  std::erase_if(finished, [](const Read& read) { return !disturbed(read); });
  return finished;
}

std::vector<HostMemory::Read> HostMemory::take_disturbed(const Range& range) {
  return take_if([&](const Read& read) { return read.range.meets(range) && disturbed(read); });
}

std::vector<HostMemory::Read> HostMemory::take(const Range& range) {
  return take_if([&](const Read& read) { return read.range.meets(range); });
}

}  // namespace vnpu::race
