#include "device/task_queues.h"

#include <algorithm>
#include <deque>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "device/device_errors.h"
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
    settle_abort(*stream);
    announce_progress();
    throw;
  }
  lock.lock();
  stream->running = false;
  if (progress == Progress::kDone) {
    settle_abort(*stream);
    announce_progress();
    return true;
  }
  stream->blocked = true;
  stream->queue.push_front(std::move(task));
  ++stream->taken;
  ++pending_;
  settle_abort(*stream);
  return false;
}

Progress TaskQueues::advance(const Stream& stream, Task& task) const {
  observers_.tell(&Observer::on_advance, stream, task);
  Progress progress;
  try {
    progress = task.step();
  } catch (...) {
    DeviceErrors::instance().note_current(stream.device, task);
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
    // Tasks behind a failed one would compute on outputs that do not exist.
    stream.queue.pop_front();
    ++stream.ended;
    --pending_;
    drop(stream, *failure, nullptr);
  } else if (progress == Progress::kDone) {
    stream.queue.pop_front();
    ++stream.ended;
    --pending_;
  }
  settle_abort(stream);
  if (!stream.blocked) announce_progress();
}

void TaskQueues::drop(Stream& stream, const Failure& failure, std::vector<TaskPtr>* dropped) {
  if (!stream.failure.has_value()) stream.failure = failure;
  std::deque<TaskPtr> kept;
  for (TaskPtr& task : stream.queue) {
    if (auto* record = dynamic_cast<EventRecord*>(task.get())) {
      record->fail(failure);
      kept.push_back(std::move(task));
    } else if (dropped != nullptr) {
      dropped->push_back(std::move(task));
    }
  }
  pending_ -= stream.queue.size() - kept.size();
  stream.ended += stream.queue.size() - kept.size();
  stream.queue = std::move(kept);
  stream.blocked = false;
}

std::shared_ptr<Abort> TaskQueues::abort(Stream& stream, const Failure& failure) {
  if (stream.abort == nullptr) stream.abort = std::make_shared<Abort>(failure);
  std::shared_ptr<Abort> abort = stream.abort;
  if (!stream.running) settle_abort(stream);
  announce_progress();
  return abort;
}

void TaskQueues::settle_abort(Stream& stream) {
  if (stream.abort == nullptr) return;
  const std::shared_ptr<Abort> abort = std::move(stream.abort);
  stream.abort = nullptr;
  if (stream.blocked) observers_.tell(&Observer::on_end, stream, *stream.queue.front(), true);
  drop(stream, abort->failure, &abort->dropped);
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
  settle_abort(stream);
  // A thread that found this head taken is asleep, and this thread may not return to the head.
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
