#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "timing/resources.h"

namespace vnpu::timing {

// The hardware queues of devices. Each stream needs a queue while one of its tasks runs. A stream
// keeps its queue until another stream needs one; then the stream whose newest task ended first
// loses its queue. That costs time, so that more streams than queues, used in turn, are slow.
class HardwareQueues {
 public:
  HardwareQueues() = default;  // as many as there are streams
  // of: a device. change: from one stream to another.
  HardwareQueues(size_t of, Time change) : most_(of), change_(change) {}

  // Initial cost of a task on this stream; nullopt: all queues are busy.
  std::optional<Time> take(int device, int stream);
  // Its task has ended.
  void release(int device, int stream, Time now);

 private:
  struct Queue {
    int stream;
    bool at_work;
    Time ended;  // its newest task
  };
  size_t most_ = 0;  // 0: no limit
  Time change_ = 0;
  std::map<int, std::vector<Queue>> queues_;  // by device
};

}  // namespace vnpu::timing
