#include "device/executor.h"

#include <algorithm>
#include <set>
#include <utility>

#include "device/pace.h"
#include "race/call_site.h"
#include "race/detector.h"
#include "trace/recorder.h"

namespace vnpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr size_t kQueueDepth = 4096;       // tasks of one stream; the host waits beyond
constexpr microseconds kOutsideWait{500};  // one sleep inside a task that waits outside
constexpr microseconds kOutsideTurn{100};  // the same when several tasks wait outside
constexpr milliseconds kPoll{5};           // longest sleep of who waits for progress
constexpr milliseconds kIdleHost{20};      // fuzz: when the host is away, work goes on

}  // namespace

Executor::Executor(const Configuration& configuration)
    : recorder_(trace::Recorder::instance()),
      pace_(Pace::instance()),
      policy_(configuration.schedule),
      wait_limit_(static_cast<int64_t>(configuration.wait_limit_seconds * 1000)),
      random_(configuration.seed),
      last_host_call_(steady_clock::now()) {
  race::Detector::instance();  // from the first task on
}

StreamPtr Executor::create_stream(int device, uint32_t priority) {
  Lock lock(mutex_);
  auto stream = std::make_shared<Stream>(device, next_stream_id_++, priority);
  streams_.push_back(stream);
  if (policy_ == SchedulePolicy::kThreads) {
    std::thread(&Executor::stream_worker, this, stream).detach();
  }
  return stream;
}

void Executor::destroy_stream(const StreamPtr& stream) {
  Lock lock(mutex_);
  if (!stream->idle()) {
    wait_until([&] { return stream->idle(); }, std::nullopt, "a stream to be destroyed", lock);
  }
  stream->destroyed = true;
  streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
  stream->wake.notify_one();
  throw_failure(*stream);
}

void Executor::submit(const StreamPtr& stream, TaskPtr task) {
  race::Detector* const detector = race::Detector::instance();
  const std::string site = race::launch_site();
  Lock lock(mutex_);
  if (stream->destroyed) {
    throw Failure(FailureKind::kInvalidHandle,
                  std::string("vnpu: ") + task->name + " was launched on a destroyed stream.");
  }
  if (stream->update != nullptr) {
    const GraphPtr graph = stream->update->graph.lock();
    if (graph == nullptr || stream->update_next >= stream->update->end) {
      throw Failure(FailureKind::kCaptureConflict,
                    std::string("vnpu: ") + task->name +
                        " does not fit into the task group under update: the group holds " +
                        std::to_string(stream->update->end - stream->update->begin) + " tasks.");
    }
    graph->replace(stream->update_next++, std::move(task));
    return;
  }
  if (stream->capture == nullptr && stream->failure.has_value()) {
    // What was launched before never came about. Records do not need it and hand the news on.
    if (auto* record = dynamic_cast<EventRecord*>(task.get())) {
      record->fail(*stream->failure);
    } else {
      throw_failure(*stream);
    }
  }
  if (detector != nullptr) detector->on_submit(*stream, *task, site);
  if (stream->capture != nullptr) {
    stream->capture->append(std::move(task));
    return;
  }
  if (recorder_ != nullptr) recorder_->on_launch(*task);
  switch (policy_) {
    case SchedulePolicy::kEager: submit_eager(stream, std::move(task), lock); return;
    case SchedulePolicy::kThreads: break;
    case SchedulePolicy::kFuzz:
      last_host_call_ = steady_clock::now();
      start_background();
      break;
  }
  enqueue(stream, std::move(task), lock);
  stream->wake.notify_one();
  work_.notify_one();
  if (policy_ == SchedulePolicy::kFuzz && random_() % 8 == 0) pump_fuzz(lock, random_() % 4);
}

void Executor::enqueue(const StreamPtr& stream, TaskPtr task, Lock& lock) {
  if (stream->queue.size() >= kQueueDepth) {
    wait_until([&] { return stream->queue.size() < kQueueDepth; }, std::nullopt,
               "room in a stream's queue", lock);
  }
  stream->queue.push_back(std::move(task));
  ++pending_;
}

// --- what waits for what ------------------------------------------------------------------------

Executor::Held Executor::held_by(const Task& head) {
  using Record = std::pair<const Event*, uint64_t>;
  Lock lock(mutex_);
  Held held;
  std::set<Record> records;
  std::set<const Stream*> streams;
  const auto waits_for_held = [&](const Task& task) {
    const auto* wait = dynamic_cast<const EventWait*>(&task);
    return wait != nullptr && records.count({&wait->event(), wait->version()}) != 0;
  };
  for (bool again = true; again;) {
    again = false;
    for (const StreamPtr& stream : streams_) {
      if (stream->queue.empty() || streams.count(stream.get()) != 0) continue;
      const Task& first = *stream->queue.front();
      if (&first != &head && !waits_for_held(first)) continue;
      again = true;
      streams.insert(stream.get());
      for (const TaskPtr& task : stream->queue) {
        if (task.get() == &head) continue;
        held.tasks.push_back(task);
        if (const auto* record = dynamic_cast<const EventRecord*>(task.get())) {
          records.insert({&record->event(), record->version()});
        }
      }
    }
  }
  for (const HostWait* wait : host_waits_) {
    const bool waits = std::any_of(streams.begin(), streams.end(), [&](const Stream* stream) {
      return stream == wait->stream || stream->device == wait->device;
    });
    if (waits || records.count({wait->event, wait->version}) != 0) held.hosts.push_back(*wait);
  }
  return held;
}

// --- events and capture ------------------------------------------------------------------------

void Executor::record(const StreamPtr& stream, const EventPtr& event) {
  uint64_t version = 0;
  {
    Lock lock(mutex_);
    event->captured_in = stream->capture;
    if (auto* detector = race::Detector::instance()) detector->on_record(*stream, *event);
    if (stream->capture != nullptr) return;
    version = event->recorded.fetch_add(1) + 1;
  }
  submit(stream, std::make_shared<EventRecord>(event, version));
}

void Executor::wait(const StreamPtr& stream, const EventPtr& event) {
  uint64_t version = 0;
  const std::string site = race::launch_site();
  {
    Lock lock(mutex_);
    race::Detector* const detector = race::Detector::instance();
    const GraphPtr graph = event->captured_in.lock();
    if (graph != nullptr && graph->state == CaptureState::kActive) {
      if (stream->capture != nullptr && stream->capture != graph) {
        throw Failure(FailureKind::kCaptureConflict,
                      "vnpu: a stream that captures one graph waits for an event of another.");
      }
      stream->capture = graph;
      if (detector != nullptr) detector->on_wait(*stream, *event, site);
      return;
    }
    if (detector != nullptr) detector->on_wait(*stream, *event, site);
    version = event->recorded.load();
    if (event->reached(version)) {
      event->throw_if_failed(version);
      return;
    }
  }
  submit(stream, std::make_shared<EventWait>(event, version));
}

void Executor::submit_eager(const StreamPtr& stream, TaskPtr task, Lock& lock) {
  if (!stream->idle()) {
    enqueue(stream, std::move(task), lock);
    pump(lock);
    return;
  }
  stream->running = true;
  lock.unlock();
  Progress progress;
  try {
    progress = advance(*stream, *task);
  } catch (...) {
    lock.lock();
    stream->running = false;
    announce_progress();
    if (pending_ > 0) pump(lock);
    throw;
  }
  lock.lock();
  stream->running = false;
  if (progress == Progress::kDone) {
    announce_progress();
    if (pending_ > 0) pump(lock);
    return;
  }
  stream->blocked = true;
  stream->queue.push_front(std::move(task));
  ++pending_;
  start_background();
  if (hosts_ == 0) work_.notify_one();
}

Progress Executor::advance(const Stream& stream, Task& task) const {
  if (recorder_ == nullptr) {
    const Progress progress = task.advance();
    if (progress == Progress::kDone) pace_.keep(task);
    return progress;
  }
  recorder_->on_advance(task);
  try {
    const Progress progress = task.advance();
    if (progress == Progress::kDone) {
      pace_.keep(task);
      recorder_->on_end(stream, task, false);
    } else {
      recorder_->on_blocked(task);
    }
    return progress;
  } catch (...) {
    recorder_->on_end(stream, task, true);
    throw;
  }
}

void Executor::announce_progress() {
  if (sleepers_ > 0) changed_.notify_all();
  if (policy_ != SchedulePolicy::kThreads) return;
  for (const StreamPtr& stream : streams_) {
    if (stream->blocked) stream->wake.notify_one();
  }
}

void Executor::wait_for_progress(steady_clock::time_point until, Lock& lock) {
  ++sleepers_;
  changed_.wait_until(lock, std::min(until, steady_clock::now() + kPoll));
  --sleepers_;
}

void Executor::run_head(Stream& stream, Lock& lock) {
  const TaskPtr task = stream.queue.front();
  stream.running = true;
  lock.unlock();
  Progress progress = Progress::kDone;
  std::optional<Failure> failure;
  try {
    progress = advance(stream, *task);
  } catch (const Failure& f) {
    failure = f;
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
    stream.queue = std::move(kept);
    stream.blocked = false;
  } else if (progress == Progress::kDone) {
    stream.queue.pop_front();
    --pending_;
  }
  if (!stream.blocked) announce_progress();
}

bool Executor::pump(Lock& lock) {
  bool any = false;
  for (bool again = true; again && pending_ > 0;) {
    again = false;
    for (size_t i = 0; i < streams_.size(); ++i) {
      const StreamPtr stream = streams_[i];
      while (!stream->queue.empty() && !stream->running) {
        run_head(*stream, lock);
        if (stream->blocked) break;
        again = any = true;
      }
    }
  }
  return any;
}

bool Executor::pump_fuzz(Lock& lock, size_t most) {
  bool any = false;
  for (size_t n = 0; n < most && pending_ > 0;) {
    std::vector<StreamPtr> candidates;
    for (const StreamPtr& stream : streams_) {
      if (!stream->queue.empty() && !stream->running) candidates.push_back(stream);
    }
    bool ran = false;
    while (!candidates.empty() && !ran) {
      const size_t pick = random_() % candidates.size();
      const StreamPtr stream = candidates[pick];
      candidates.erase(candidates.begin() + static_cast<ptrdiff_t>(pick));
      if (stream->queue.empty() || stream->running) continue;
      run_head(*stream, lock);
      ran = !stream->blocked;
    }
    if (!ran) break;
    any = true;
    ++n;
  }
  return any;
}

bool Executor::wait_outside(Lock& lock) {
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

void Executor::wait_inside(Stream& stream, microseconds limit, Lock& lock) {
  const TaskPtr task = stream.queue.front();
  stream.running = stream.waiting = true;
  lock.unlock();
  task->wait(limit);
  lock.lock();
  stream.running = stream.waiting = false;
  // Another thread that saw this head taken sleeps, and this one may not come back to it.
  announce_progress();
}

// --- threads of the executor -----------------------------------------------------------------

void Executor::start_background() {
  if (background_started_) return;
  background_started_ = true;
  std::thread(&Executor::background, this).detach();
}

void Executor::background() {
  Lock lock(mutex_);
  for (;;) {
    if (policy_ == SchedulePolicy::kFuzz) {
      // The order stays the seed's as long as the host keeps calling.
      if (pending_ == 0) {
        work_.wait(lock);
      } else if (hosts_ > 0 || steady_clock::now() - last_host_call_ < kIdleHost) {
        work_.wait_for(lock, kIdleHost);
      } else if (!pump_fuzz(lock, 1) && !wait_outside(lock)) {
        wait_for_progress(steady_clock::now() + kPoll, lock);
      }
    } else if (pending_ == 0 || hosts_ > 0) {
      work_.wait(lock);
    } else if (!pump(lock) && !wait_outside(lock)) {
      wait_for_progress(steady_clock::now() + kPoll, lock);
    }
  }
}

void Executor::stream_worker(StreamPtr stream) {
  Lock lock(mutex_);
  while (!stream->destroyed) {
    if (stream->queue.empty()) {
      stream->wake.wait(lock);
      continue;
    }
    run_head(*stream, lock);
    if (!stream->blocked) continue;
    if (stream->queue.front()->waits_outside()) {
      wait_inside(*stream, kOutsideWait, lock);
    } else {
      stream->wake.wait_for(lock, kPoll);
    }
  }
}

}  // namespace vnpu
