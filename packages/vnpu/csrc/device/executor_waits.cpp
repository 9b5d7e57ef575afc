// The host's waits for streams, events and devices, and its queries whether they are done.

#include <algorithm>
#include <utility>

#include "device/executor.h"
#include "device/faults.h"
#include "device/host_counts.h"

namespace vnpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// For a queue that has hung before, and in which no task has ended since.
constexpr milliseconds kSecondPatience{20};

}  // namespace

// Registers a host wait, so that held_by() finds it. Constructed and destroyed under the lock.
class Executor::AnnouncedWait {
 public:
  AnnouncedWait(Executor& executor, HostWait wait) : executor_(executor), wait_(std::move(wait)) {
    if (executor.observers_.needs().deadlocks) executor.host_waits_.push_back(&wait_);
  }
  ~AnnouncedWait() { std::erase(executor_.host_waits_, &wait_); }
  AnnouncedWait(const AnnouncedWait&) = delete;
  AnnouncedWait& operator=(const AnnouncedWait&) = delete;

 private:
  Executor& executor_;
  HostWait wait_;
};

void Executor::wait_until(const std::function<bool()>& done, Limit limit, const char* what,
                          Lock& lock) {
  const auto begin = steady_clock::now();
  const milliseconds most = limit.has_value() ? std::min(*limit, wait_limit_) : wait_limit_;
  const auto deadline = begin + most;
  const TaskQueues::Driver driver(queues_);
  while (!done()) {
    if (schedule_->drive(lock) || done()) continue;
    if (steady_clock::now() >= deadline) {
      throw Failure(FailureKind::kWaitTimeout, std::string("vnpu: waited ") +
                                                   std::to_string(most.count()) + " ms for " +
                                                   what + ". Pending: " + describe_pending() +
                                                   ". A longer wait: VNPU_WAIT_LIMIT=SECONDS.");
    }
    schedule_->rest(deadline, lock);
  }
}

std::string Executor::describe_pending() const {
  std::string text;
  for (const StreamPtr& stream : queues_.streams()) {
    if (stream->queue.empty()) continue;
    if (!text.empty()) text += "; ";
    const Task& head = *stream->queue.front();
    text +=
        "stream " + std::to_string(stream->id) + " of device " + std::to_string(stream->device) +
        ": " + std::to_string(stream->queue.size()) + " tasks, the first (" + head.name + ") " +
        (stream->running && !stream->waiting ? "is running" : "waits for " + head.waiting_for());
  }
  return text.empty() ? "nothing is queued" : text;
}

void Executor::throw_failure(Stream& stream) {
  if (!stream.failure.has_value()) return;
  const Failure failure = *stream.failure;
  stream.failure.reset();
  throw failure;
}

void Executor::synchronize(const StreamPtr& stream, Limit limit) {
  faults::reach(faults::Kind::kSynchronize, "stream");
  ++HostCounts::instance().synchronizations;
  const std::string site = observers_.call_site();
  {
    Lock lock(queues_.mutex);
    if (stream->capture != nullptr) {
      throw CaptureFailure(
          CaptureRule::kHostWait,
          "vnpu: a capturing stream cannot be synchronised: what it launches is kept and not run. "
          "End the capture first.");
    }
    if (!stream->idle()) {
      const AnnouncedWait announced(*this, {.call_site = site, .stream = stream.get()});
      wait_until([&] { return stream->idle(); }, limit, "a stream", lock);
    }
    observers_.tell(&Observer::on_stream_waited, *stream);
    observers_.tell(&Observer::on_stream_synchronized, *stream, site);
    throw_failure(*stream);
  }
  observers_.tell(&Observer::on_wait_over);
}

void Executor::synchronize(const EventPtr& event, Limit limit) {
  faults::reach(faults::Kind::kSynchronize, "event");
  ++HostCounts::instance().synchronizations;
  check_not_captured(*event, "waits for");
  const uint64_t version = event->newest();
  if (observers_.any() || !event->reached(version)) {
    const std::string site = observers_.call_site();
    {
      Lock lock(queues_.mutex);
      const AnnouncedWait announced(*this,
                                    {.call_site = site, .event = event.get(), .version = version});
      const auto is_over = [&] { return event->reached(version) || event->is_abandoned(version); };
      wait_until(is_over, limit, "an event", lock);
      observers_.tell(&Observer::on_event_waited, *event);
      observers_.tell(&Observer::on_event_synchronized, *event, site);
    }
    observers_.tell(&Observer::on_wait_over);
  }
  event->throw_if_failed(version);
}

void Executor::synchronize_device(int device, Limit limit) {
  faults::reach(faults::Kind::kSynchronize, "device");
  ++HostCounts::instance().synchronizations;
  const std::string site = observers_.call_site();
  // One failure may have reached several streams through events: it is reported once.
  std::optional<Failure> first;
  {
    Lock lock(queues_.mutex);
    for (const StreamPtr& stream : queues_.streams()) {
      if (stream->device != device || stream->capture == nullptr) continue;
      throw CaptureFailure(
          CaptureRule::kHostWait,
          "vnpu: the device cannot be synchronised while a stream captures, here since" +
              stream->capture->origin.call_site + "\n  Synchronise before or after the capture.");
    }
    if (!device_idle(device)) {
      const AnnouncedWait announced(*this, {.call_site = site, .device = device});
      wait_until([&] { return device_idle(device); }, limit, "a device", lock);
    }
    host_has_seen(device, site);
    for (const StreamPtr& stream : queues_.streams()) {
      if (stream->device != device || !stream->failure.has_value()) continue;
      if (!first.has_value()) first = stream->failure;
      stream->failure.reset();
    }
  }
  observers_.tell(&Observer::on_wait_over);
  if (first.has_value()) throw *first;
}

bool Executor::device_idle(int device) const {
  return std::all_of(
      queues_.streams().begin(), queues_.streams().end(),
      [&](const StreamPtr& stream) { return stream->device != device || stream->idle(); });
}

Executor::Tails Executor::tails(int device) {
  const Lock lock(queues_.mutex);
  Tails tails;
  for (const StreamPtr& stream : queues_.streams()) {
    if (stream->device == device && !stream->idle()) tails.emplace_back(stream, stream->taken);
  }
  return tails;
}

bool Executor::have_passed(const Tails& tails) {
  const Lock lock(queues_.mutex);
  return have_passed_locked(tails);
}

bool Executor::have_passed_locked(const Tails& tails) const {
  return std::all_of(tails.begin(), tails.end(), [](const auto& tail) {
    return tail.first->ended >= tail.second || tail.first->idle();
  });
}

bool Executor::drain_device(int device, Limit patience) {
  const Tails before = tails(device);
  if (before.empty()) return true;
  Lock lock(queues_.mutex);
  const auto ended = [&] {
    uint64_t count = 0;
    for (const auto& [stream, taken] : before) count += std::min(stream->ended, taken);
    return count;
  };
  const auto is_running = [&] {
    return std::any_of(before.begin(), before.end(), [](const auto& tail) {
      return tail.first->running && !tail.first->waiting && !tail.first->blocked;
    });
  };
  const TaskQueues::Driver driver(queues_);
  const Tails& stuck = stuck_[device];
  const bool is_stuck = std::any_of(stuck.begin(), stuck.end(), [](const auto& tail) {
    return tail.first->ended == tail.second && !tail.first->idle();
  });
  const milliseconds limit = patience.value_or(wait_limit_);
  const milliseconds most = is_stuck ? std::min(kSecondPatience, limit) : limit;
  auto since = steady_clock::now();
  for (uint64_t seen = ended(); !have_passed_locked(before);) {
    const bool worked = schedule_->drive(lock);
    const auto now = steady_clock::now();
    if (ended() != seen || is_running()) {
      seen = ended();
      since = now;
    } else if (now - since >= most) {
      Tails& now_stuck = stuck_[device];
      now_stuck.clear();
      for (const auto& [stream, taken] : before) {
        if (stream->ended < taken) now_stuck.emplace_back(stream, stream->ended);
      }
      return false;
    }
    if (!worked) schedule_->rest(since + most, lock);
  }
  stuck_.erase(device);
  return true;
}

void Executor::while_nothing_runs(const std::function<void()>& action) {
  Lock lock(queues_.mutex);
  const auto rests = [&] {
    return std::ranges::none_of(queues_.streams(), [](const StreamPtr& stream) {
      return stream->running && !stream->waiting;
    });
  };
  wait_until(rests, std::nullopt, "tasks that run", lock);
  action();
}

std::string Executor::pending() const {
  const Lock lock(queues_.mutex);
  return describe_pending();
}

void Executor::host_has_seen(int device, const std::string& call_site) {
  observers_.tell(&Observer::on_device_waited, device);
  for (const StreamPtr& stream : queues_.streams()) {
    if (stream->device != device) continue;
    observers_.tell(&Observer::on_stream_synchronized, *stream, call_site);
  }
}

bool Executor::query(const StreamPtr& stream) {
  const std::string site = observers_.call_site();
  Lock lock(queues_.mutex);
  if (stream->capture != nullptr) {
    throw CaptureFailure(CaptureRule::kHostWait,
                         "vnpu: the host asks whether a capturing stream is done: what it launches "
                         "is kept and not run. Ask after the capture.");
  }
  if (!stream->idle()) schedule_->poll(lock);
  if (!stream->idle()) return false;
  observers_.tell(&Observer::on_stream_synchronized, *stream, site);
  return true;
}

void Executor::check_not_captured(const Event& event, const char* what) {
  const GraphPtr graph = event.captured_in.lock();
  if (graph == nullptr || graph->state != CaptureState::kActive) return;
  throw CaptureFailure(CaptureRule::kHostWait,
                       std::string("vnpu: the host ") + what +
                           " an event that was recorded in a capture, which runs nothing. The "
                           "capture began at" +
                           graph->origin.call_site + "\n  Use the event after the capture.");
}

bool Executor::query(const EventPtr& event) {
  check_not_captured(*event, "asks about");
  if (event->complete() && !observers_.any()) return true;
  const std::string site = observers_.call_site();
  Lock lock(queues_.mutex);
  if (!event->complete()) schedule_->poll(lock);
  if (!event->complete()) return false;
  observers_.tell(&Observer::on_event_synchronized, *event, site);
  return true;
}

}  // namespace vnpu
