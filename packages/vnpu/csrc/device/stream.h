#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "device/cores.h"
#include "device/event.h"
#include "device/failure.h"
#include "device/graph.h"
#include "device/task.h"

namespace vnpu {

// An abort of a stream's queued tasks.
struct Abort {
  Failure failure;               // error of the aborted tasks
  std::vector<TaskPtr> dropped;  // tasks that are not done, or not all
};

// An in-order queue of one device. All members below are guarded by the executor's lock.
class Stream {
 public:
  Stream(int device, int id, uint32_t priority) : device(device), id(id), priority(priority) {}

  bool idle() const { return queue.empty() && !running; }

  const int device;
  const int id;
  const uint32_t priority;

  std::deque<TaskPtr> queue;  // the head may be running
  uint64_t taken = 0;         // tasks that were ever in it
  uint64_t ended = 0;         // tasks that are done, failed or dropped
  bool running = false;       // one thread is inside step() or wait() of the head
  bool waiting = false;       // that thread is inside wait()
  bool blocked = false;       // the head's last step() returned kBlocked
  bool destroyed = false;
  std::condition_variable wake;    // its worker's, under the threads policy
  std::optional<Failure> failure;  // the first error since it was last reported
  // Not null while another thread is inside the head of a queue that is to be dropped.
  std::shared_ptr<Abort> abort;

  CoreLimit cores;  // not guarded

  GraphPtr capture;                          // not null while capturing
  bool capture_origin = false;               // began the capture (others joined by events)
  std::shared_ptr<Graph::TaskGroup> update;  // launches replace this group's nodes
  std::vector<TaskPtr> updated;              // updates launched so far
};

using StreamPtr = std::shared_ptr<Stream>;

}  // namespace vnpu
