#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/task.h"

namespace vnpu {

// Artificial durations [VNPU_PACE]: the time for which a task keeps its stream busy, in addition to
// its arithmetic. "aclnnMatmul=300,all_reduce=500/MiB" are microseconds per task whose name begins
// with that prefix, or per MiB that it writes; the longest prefix counts. The time is slept, so
// that streams whose tasks sleep at once overlap on any number of host cores. Under the policy
// `threads` each stream sleeps for itself; the other policies run one task at a time.
class Pace {
 public:
  // Parses "NAME=MICROSECONDS,...". Throws Failure for text that does not parse.
  explicit Pace(const std::string& text);

  // From this process's environment, read once.
  static const Pace& instance();

  // Sleeps for the duration of this task, if its name has one.
  void keep(const Task& task) const;

 private:
  struct Duration {
    std::string beginning;
    int64_t microseconds;
    bool per_mebibyte;
  };
  std::vector<Duration> durations_;
};

}  // namespace vnpu
