#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "race/launch.h"
#include "race/vector_clock.h"

namespace vnpu::race {

// Pinned host memory that launches read, until the host knows that they have finished. What the
// host writes there is not seen, but a change of the contents is: a write of the same bytes stays
// unnoticed, and so does what the host reads of a copy to it that may not have finished.
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
  // A launch writes the range, behind the reads of it: from now on its contents say nothing.
  void written(const Range& range, const LaunchPtr& launch);

  // Forgets what the host knows to have finished; returns the reads among it that it disturbed.
  std::vector<Read> take_finished(const VectorClock& host);
  // Takes out the reads of a range that the host has disturbed.
  std::vector<Read> take_disturbed(const Range& range);
  // Takes out all reads of a range.
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
