#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "race/launch.h"
#include "race/vector_clock.h"

namespace vnpu::race {

// Pinned host memory that launches read, until the host knows that they have finished. Host writes
// are detected by a change of the contents. So a write of the same bytes stays unnoticed, as does a
// host read of the target of an unfinished copy.
class HostMemory {
 public:
  struct Range {
    uintptr_t begin;
    uintptr_t end;

    bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
  };
  struct Read {
    Range range;
    LaunchPtr launch;
    size_t contents;  // hash at the launch
  };

  // From now on the range must keep its contents until the launch is known to have finished.
  void read(const Range& range, const LaunchPtr& launch);
  // A launch writes the range after these reads: from now on its contents are not compared.
  void written(const Range& range, const LaunchPtr& launch);

  // Removes reads that the host knows to be finished; returns those whose memory it changed.
  std::vector<Read> take_finished(const VectorClock& host);
  // Removes reads of a range whose memory the host has changed, and returns them.
  std::vector<Read> take_disturbed(const Range& range);
  // Removes all reads of a range, and returns them.
  std::vector<Read> take(const Range& range);

 private:
  struct Write {
    Range range;
    LaunchPtr launch;
  };
  template <class Which>
  std::vector<Read> take_if(const Which& which);

  std::vector<Read> reads_;
  std::vector<Write> writes_;  // not known to have finished
};

}  // namespace vnpu::race
