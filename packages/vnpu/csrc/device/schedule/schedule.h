#pragma once

#include <cstdint>
#include <memory>

#include "device/configuration.h"
#include "device/task_queues.h"

namespace vnpu {

// Decides which stream's next task runs, where and when. Streams are in order; between streams any
// order that events allow is correct, and schedules differ only in which one they take. All calls
// come under the queues' lock.
class Schedule {
 public:
  using Lock = TaskQueues::Lock;

  virtual ~Schedule() = default;

  // A stream has been made.
  virtual void on_stream(const StreamPtr&) {}
  // Takes a task for a stream whose queue has room. If it ran at once and failed, throws its
  // Failure.
  virtual void submit(const StreamPtr& stream, TaskPtr task, Lock& lock) = 0;
  // Called by a host thread that waits: runs work on it; false if no work can run now.
  virtual bool drive(Lock& lock) = 0;
  // ... and could do none: sleeps, at most until `until`.
  virtual void rest(std::chrono::steady_clock::time_point until, Lock& lock) = 0;
  // Called after a host thread's query found unfinished work: lets pending work run.
  virtual void poll(Lock& lock) = 0;
};

// Runs a task at once, on the launching thread, when nothing is before it; a background thread runs
// what is long (a graph's replay), so that the host prepares the next step meanwhile, and finishes
// what cannot run at once (another rank is late, say).
std::unique_ptr<Schedule> make_eager_schedule(TaskQueues& queues);
// One worker thread per stream.
std::unique_ptr<Schedule> make_threads_schedule(TaskQueues& queues);
// Runs tasks as late as the program allows, in an order drawn from the seed, so that a missing wait
// shows as a wrong result.
std::unique_ptr<Schedule> make_fuzz_schedule(TaskQueues& queues, uint64_t seed);

// The schedule that VNPU_SCHEDULE names.
std::unique_ptr<Schedule> make_schedule(const Configuration& configuration, TaskQueues& queues);

}  // namespace vnpu
