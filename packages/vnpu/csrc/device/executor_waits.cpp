// The host's side: waits for streams, events and devices, and questions whether they are done.

#include <algorithm>
#include <utility>

#include "device/executor.h"
#include "device/host_counts.h"
#include "race/call_site.h"
#include "race/detector.h"

namespace vnpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The race detector, where there is one and what the calling thread finds out counts as known to
// the program.
race::Detector* detector_of_host() {
  race::Detector* const detector = race::Detector::instance();
  return detector != nullptr && race::is_program_thread() ? detector : nullptr;
}

}  // namespace

// Lets held_by() know of a host wait while it lasts. Made and ended under the lock.
class Executor::AnnouncedWait {
 public:
  AnnouncedWait(Executor& executor, HostWait wait) : executor_(executor), wait_(std::move(wait)) {
    if (race::Detector::instance() == nullptr) return;
    wait_.thread = std::this_thread::get_id();
    executor_.host_waits_.push_back(&wait_);
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
  // While a host thread drives the streams, the background thread need not.
  struct Driver {
    explicit Driver(Executor& executor) : executor(executor) { ++executor.hosts_; }
    ~Driver() {
      if (--executor.hosts_ == 0 && executor.pending_ > 0) executor.work_.notify_one();
    }
    Executor& executor;
  } driver(*this);
  while (!done()) {
    bool worked = false;
    if (policy_ == SchedulePolicy::kEager) worked = pump(lock);
    if (policy_ == SchedulePolicy::kFuzz) worked = pump_fuzz(lock, 1);
    last_host_call_ = steady_clock::now();
    if (worked || done()) continue;
    if (last_host_call_ >= deadline) {
      throw Failure(FailureKind::kWaitTimeout, std::string("vnpu: waited ") +
                                                   std::to_string(most.count()) + " ms for " +
                                                   what + ". Pending: " + describe_pending() +
                                                   ". A longer wait: VNPU_WAIT_LIMIT=SECONDS.");
    }
    if (policy_ != SchedulePolicy::kThreads && wait_outside(lock)) continue;
    wait_for_progress(deadline, lock);
  }
}

std::string Executor::describe_pending() const {
  std::string text;
  for (const StreamPtr& stream : streams_) {
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
  ++HostCounts::instance().synchronizations;
  const std::string site = race::launch_site();
  Lock lock(mutex_);
  if (stream->capture != nullptr) {
    throw Failure(FailureKind::kCaptureConflict,
                  "vnpu: a capturing stream cannot be synchronised; end the capture first.");
  }
  if (!stream->idle()) {
    const AnnouncedWait announced(*this, {.call_site = site, .stream = stream.get()});
    wait_until([&] { return stream->idle(); }, limit, "a stream", lock);
  }
  if (auto* detector = detector_of_host()) detector->on_host_wait(*stream, site);
  throw_failure(*stream);
}

void Executor::synchronize(const EventPtr& event, Limit limit) {
  ++HostCounts::instance().synchronizations;
  race::Detector* const detector = detector_of_host();
  const uint64_t version = event->recorded.load();
  if (detector != nullptr || !event->reached(version)) {
    const std::string site = race::launch_site();
    Lock lock(mutex_);
    const AnnouncedWait announced(*this,
                                  {.call_site = site, .event = event.get(), .version = version});
    wait_until([&] { return event->reached(version); }, limit, "an event", lock);
    if (detector != nullptr) detector->on_host_wait(*event, site);
  }
  event->throw_if_failed(version);
}

void Executor::synchronize_device(int device, Limit limit) {
  ++HostCounts::instance().synchronizations;
  const std::string site = race::launch_site();
  Lock lock(mutex_);
  for (const StreamPtr& stream : streams_) {
    if (stream->device == device && stream->capture != nullptr) {
      throw Failure(FailureKind::kCaptureConflict,
                    "vnpu: the device cannot be synchronised while a stream captures.");
    }
  }
  if (!device_idle(device)) {
    const AnnouncedWait announced(*this, {.call_site = site, .device = device});
    wait_until([&] { return device_idle(device); }, limit, "a device", lock);
  }
  host_has_seen(device, site);
  // One failure may have reached several streams through events: it is reported once.
  std::optional<Failure> first;
  for (const StreamPtr& stream : streams_) {
    if (stream->device != device || !stream->failure.has_value()) continue;
    if (!first.has_value()) first = stream->failure;
    stream->failure.reset();
  }
  if (first.has_value()) throw *first;
}

bool Executor::device_idle(int device) const {
  return std::all_of(streams_.begin(), streams_.end(), [&](const StreamPtr& stream) {
    return stream->device != device || stream->idle();
  });
}

void Executor::drain_device(int device) {
  const std::string site = race::launch_site();
  Lock lock(mutex_);
  if (!device_idle(device)) {
    wait_until([&] { return device_idle(device); }, std::nullopt, "a device", lock);
  }
  host_has_seen(device, site);
}

void Executor::host_has_seen(int device, const std::string& call_site) {
  race::Detector* const detector = detector_of_host();
  if (detector == nullptr) return;
  for (const StreamPtr& stream : streams_) {
    if (stream->device == device) detector->on_host_wait(*stream, call_site);
  }
}

bool Executor::query(const StreamPtr& stream) {
  const std::string site = race::launch_site();
  Lock lock(mutex_);
  if (!stream->idle()) {
    if (policy_ == SchedulePolicy::kEager) pump(lock);
    if (policy_ == SchedulePolicy::kFuzz) pump_fuzz(lock, 1 + random_() % 4);
  }
  if (!stream->idle()) return false;
  if (auto* detector = detector_of_host()) detector->on_host_wait(*stream, site);
  return true;
}

bool Executor::query(const EventPtr& event) {
  race::Detector* const detector = detector_of_host();
  if (event->complete() && detector == nullptr) return true;
  const std::string site = race::launch_site();
  Lock lock(mutex_);
  if (!event->complete()) {
    if (policy_ == SchedulePolicy::kEager) pump(lock);
    if (policy_ == SchedulePolicy::kFuzz) pump_fuzz(lock, 1 + random_() % 4);
  }
  if (!event->complete()) return false;
  if (detector != nullptr) detector->on_host_wait(*event, site);
  return true;
}

}  // namespace vnpu
