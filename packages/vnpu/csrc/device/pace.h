#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace vnpu {

// Artificial durations [VNPU_PACE]: how long a task keeps its stream busy, beside what its
// arithmetic takes. "aclnnMatmul=300,all_reduce=500" are microseconds per task whose name begins
// so; the longest beginning counts. The time is slept, so that streams whose tasks sleep at once
// overlap on any number of host cores. Under the policy `threads` each stream sleeps for itself;
// the other policies run one task at a time.
class Pace {
 public:
  // Of "NAME=MICROSECONDS,...". Throws Failure for text that does not parse.
  explicit Pace(const std::string& text);

  // Of this process's environment, read once.
  static const Pace& instance();

  // Sleeps for the duration of a task of this name, if it has one.
  void keep(const char* task_name) const;

 private:
  std::vector<std::pair<std::string, std::chrono::microseconds>> durations_;
};

}  // namespace vnpu
