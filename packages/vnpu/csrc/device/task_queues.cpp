#include "device/task_queues.h"

#include <algorithm>
#include <deque>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "device/observer.h"
#include "device/pace.h"

namespace vnpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr microseconds kOutsideWait{500};  // one sleep inside a task that waits outside
constexpr microseconds kOutsideTurn{100};  // the same when several tasks wait outside
constexpr milliseconds kPoll{5};           // longest sleep of who waits for progress

}  // namespace

void TaskQueues::enqueue(const StreamPtr& stream, TaskPtr task) {
  stream->queue.push_back(std::move(task));
  ++stream->taken;
  ++pending_;
}

bool TaskQueues::run_now(const StreamPtr& stream, TaskPtr task, Lock& lock) {
  stream->running = true;
  lock.unlock();
  Progress progress;
  try {
    progress = advance(*stream, *task);
  } catch (...) {
    lock.lock();
    stream->running = false;
    announce_progress();
    throw;
  }
  lock.lock();
  stream->running = false;
  if (progress == Progress::kDone) {
    announce_progress();
    return true;
  }
  stream->blocked = true;
  stream->queue.push_front(std::move(task));
  ++stream->taken;
  ++pending_;
  return false;
}

Progress TaskQueues::advance(const Stream& stream, Task& task) const {
  observers_.tell(&Observer::on_advance, stream, task);
  Progress progress;
  try {
    progress = task.step();
  } catch (...) {
    observers_.tell(&Observer::on_end, stream, task, true);
    throw;
  }
  if (progress == Progress::kBlocked) {
    observers_.tell(&Observer::on_blocked, stream, task);
    return progress;
  }
  pace_.keep(task);
  observers_.tell(&Observer::on_end, stream, task, false);
  return progress;
}

void TaskQueues::run_head(Stream& stream, Lock& lock) {
  const TaskPtr task = stream.queue.front();
  stream.running = true;
  lock.unlock();
  Progress progress = Progress::kDone;
  std::optional<Failure> failure;
  try {
    progress = advance(stream, *task);
  } catch (const Failure& f) {
    failure = f;
  } catch (const std::bad_alloc&) {
    failure = Failure(FailureKind::kOutOfMemory,
                      std::string("vnpu: ") + task->name + ": the host is out of memory.");
  } catch (const std::exception& e) {
    failure = Failure(FailureKind::kInternal, std::string("vnpu: ") + task->name + ": " + e.what());
  }
  lock.lock();
  stream.running = false;
  stream.blocked = progress == Progress::kBlocked;
  if (failure.has_value()) {
    if (!stream.failure.has_value()) stream.failure = failure;
    // What was queued behind a failed task would compute on what it did not produce. Event records
    // still happen, so that other streams do not wait for ever, and tell those of the failure.
    std::deque<TaskPtr> kept;
    for (size_t i = 1; i < stream.queue.size(); ++i) {
      if (auto* record = dynamic_cast<EventRecord*>(stream.queue[i].get())) {
        record->fail(*failure);
        kept.push_back(std::move(stream.queue[i]));
      }
    }
    pending_ -= stream.queue.size() - kept.size();
    stream.ended += stream.queue.size() - kept.size();
    stream.queue = std::move(kept);
    stream.blocked = false;
  } else if (progress == Progress::kDone) {
    stream.queue.pop_front();
    ++stream.ended;
    --pending_;
  }
  if (!stream.blocked) announce_progress();
}

bool TaskQueues::run_heads(bool long_ones, Lock& lock) {
  bool any = false;
  for (bool again = true; again && pending_ > 0;) {
    again = false;
    for (size_t i = 0; i < streams_.size(); ++i) {
      const StreamPtr stream = streams_[i];
      while (!stream->queue.empty() && !stream->running) {
        if (!long_ones && stream->queue.front()->is_long()) break;
        run_head(*stream, lock);
        if (stream->blocked) break;
        again = any = true;
      }
    }
  }
  return any;
}

// --- sleeping ------------------------------------------------------------------------------------

bool TaskQueues::wait_outside(Lock& lock) {
  StreamPtr chosen;
  size_t count = 0;
  for (size_t i = 0; i < streams_.size(); ++i) {
    const StreamPtr& stream = streams_[(next_outside_ + i) % streams_.size()];
    if (stream->queue.empty() || stream->running || !stream->blocked) continue;
    if (!stream->queue.front()->waits_outside()) continue;
    if (chosen == nullptr) chosen = stream;
    ++count;
  }
  if (chosen == nullptr) return false;
  ++next_outside_;  // the next search looks elsewhere first
  wait_inside(*chosen, count > 1 ? kOutsideTurn : kOutsideWait, lock);
  return true;
}

void TaskQueues::wait_inside(Stream& stream, Lock& lock) {
  wait_inside(stream, kOutsideWait, lock);
}

void TaskQueues::wait_inside(Stream& stream, microseconds limit, Lock& lock) {
  const TaskPtr task = stream.queue.front();
  stream.running = stream.waiting = true;
  lock.unlock();
  task->wait(limit);
  lock.lock();
  stream.running = stream.waiting = false;
  // Another thread that saw this head taken sleeps, and this one may not come back to it.
  announce_progress();
}

void TaskQueues::announce_progress() {
  if (sleepers_ > 0) changed_.notify_all();
}

void TaskQueues::wait_for_progress(steady_clock::time_point until, Lock& lock) {
  ++sleepers_;
  changed_.wait_until(lock, std::min(until, steady_clock::now() + kPoll));
  --sleepers_;
}

void TaskQueues::start_background(std::function<void(Lock&)> turn) {
  if (background_started_) return;
  background_started_ = true;
  std::thread([this, turn = std::move(turn)] {
    Lock lock(mutex);
    for (;;) turn(lock);
  }).detach();
}

}  // namespace vnpu
