#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "device/stream.h"

namespace vnpu {

class Observers;
class Pace;

// The queues of all streams, and the steps from which a schedule is made: run the task at the head
// of a queue, sleep in one that waits for something outside, sleep until something changes. All
// members come under `mutex`, which is released while a task runs or a thread sleeps.
class TaskQueues {
 public:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr size_t kDepth = 4096;  // tasks of one stream; the host waits beyond

  TaskQueues(const Observers& observers, const Pace& pace) : observers_(observers), pace_(pace) {}

  std::mutex mutex;  // guards Stream members too
  const std::vector<StreamPtr>& streams() const { return streams_; }
  size_t pending() const { return pending_; }  // tasks in queues
  void add(const StreamPtr& stream) { streams_.push_back(stream); }
  void remove(const StreamPtr& stream) { std::erase(streams_, stream); }

  void enqueue(const StreamPtr& stream, TaskPtr task);
  // Runs a task at once, on an idle stream; queues it if it blocks, and then returns false. Throws
  // its Failure.
  bool run_now(const StreamPtr& stream, TaskPtr task, Lock& lock);
  // Runs the head of a stream until it is done or blocked.
  void run_head(Stream& stream, Lock& lock);
  // Drops the tasks of a stream, as if its head had failed: at once, or as soon as the thread
  // inside its head leaves it; stream.abort is null then.
  std::shared_ptr<Abort> abort(Stream& stream, const Failure& failure);
  // Runs all that can run, stream by stream; returns whether anything got done.
  bool run_all(Lock& lock) { return run_heads(true, lock); }
  // For a thread that has other work: runs tasks up to a long one on each stream.
  bool run_short(Lock& lock) { return run_heads(false, lock); }
  // Sleeps inside a head that waits for something outside the device, and that no other thread is
  // in; false if there is none.
  bool wait_outside(Lock& lock);
  // Waits inside the head of this stream.
  void wait_inside(Stream& stream, Lock& lock);
  // Sleeps until a task ends, but only briefly and at most until `until`; the caller checks again.
  void wait_for_progress(std::chrono::steady_clock::time_point until, Lock& lock);

  // --- host threads that wait, and the thread that takes over when there is none ---------------
  // A host thread that waits drives the streams itself while this lives.
  class Driver {
   public:
    explicit Driver(TaskQueues& queues) : queues_(queues) { ++queues_.drivers_; }
    ~Driver() {
      if (--queues_.drivers_ == 0 && queues_.pending_ > 0) queues_.background_.notify_one();
    }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

   private:
    TaskQueues& queues_;
  };
  bool is_driven() const { return drivers_ > 0; }
  // Calls `turn` repeatedly on a thread of its own, which the first call starts.
  void start_background(std::function<void(Lock&)> turn);
  void wake_background() { background_.notify_one(); }
  // In a turn: sleeps until woken, or at most so long.
  void sleep_in_background(Lock& lock) { background_.wait(lock); }
  void sleep_in_background(Lock& lock, std::chrono::milliseconds most) {
    background_.wait_for(lock, most);
  }

 private:
  bool run_heads(bool long_ones, Lock& lock);
  // One call of a task, with the time it takes. Not under the lock.
  Progress advance(const Stream& stream, Task& task) const;
  void wait_inside(Stream& stream, std::chrono::microseconds limit, Lock& lock);
  // After the head has failed or was aborted. Event records still complete, with the failure, so
  // that other streams do not wait forever.
  void drop(Stream& stream, const Failure& failure, std::vector<TaskPtr>* dropped);
  // For a thread that has left the head: drops the tasks that an abort has to drop.
  void settle_abort(Stream& stream);
  // Tells the threads that sleep until something changes.
  void announce_progress();

  const Observers& observers_;
  const Pace& pace_;
  std::vector<StreamPtr> streams_;
  size_t pending_ = 0;
  std::condition_variable changed_;  // a task ended
  size_t sleepers_ = 0;              // threads that wait for changed_
  std::condition_variable background_;
  bool background_started_ = false;
  size_t drivers_ = 0;
  size_t next_outside_ = 0;  // where the search for a head to wait in begins
};

}  // namespace vnpu
