#include "device/executor.h"

#include <algorithm>
#include <set>
#include <utility>

#include "device/device_limits.h"
#include "device/faults.h"
#include "device/faulty_task.h"
#include "device/host_counts.h"
#include "device/pace.h"

namespace vnpu {

Executor::Executor(const Configuration& configuration, const Observers& observers)
    : observers_(observers),
      wait_limit_(static_cast<int64_t>(configuration.wait_limit_seconds * 1000)),
      queues_(observers, Pace::instance()),
      schedule_(make_schedule(configuration, queues_)) {}

StreamPtr Executor::create_stream(int device, uint32_t priority) {
  faults::reach(faults::Kind::kStream);
  DeviceLimits::instance().take(DeviceLimits::Kind::kStreams, device, 1);
  const Lock lock(queues_.mutex);
  auto stream = std::make_shared<Stream>(device, next_stream_id_++, priority);
  queues_.add(stream);
  schedule_->on_stream(stream);
  return stream;
}

void Executor::destroy_stream(const StreamPtr& stream) {
  Lock lock(queues_.mutex);
  if (!stream->idle()) {
    wait_until([&] { return stream->idle(); }, std::nullopt, "a stream to be destroyed", lock);
  }
  stream->destroyed = true;
  queues_.remove(stream);
  DeviceLimits::instance().give(DeviceLimits::Kind::kStreams, stream->device, 1);
  stream->wake.notify_one();
  throw_failure(*stream);
}

void Executor::submit(const StreamPtr& stream, TaskPtr task) {
  HostCounts::instance().launches.fetch_add(1, std::memory_order_relaxed);
  faults::reach_launch(task);
  enqueue(stream, std::move(task));
}

void Executor::enqueue(const StreamPtr& stream, TaskPtr task) {
  const std::string site = observers_.call_site();
  Lock lock(queues_.mutex);
  if (stream->destroyed) {
    throw Failure(FailureKind::kInvalidHandle,
                  std::string("vnpu: ") + task->name + " was launched on a destroyed stream.");
  }
  if (keep(stream, task, site)) return;
  if (stream->failure.has_value()) {
    // An earlier task failed, so its result does not exist. Records do not need it and pass on the
    // failure.
    if (auto* record = dynamic_cast<EventRecord*>(task.get())) {
      record->fail(*stream->failure);
    } else {
      throw_failure(*stream);
    }
  }
  observers_.tell(&Observer::on_launch, *stream, *task, site);
  if (stream->queue.size() >= TaskQueues::kDepth) {
    wait_until([&] { return stream->queue.size() < TaskQueues::kDepth; }, std::nullopt,
               "room in a stream's queue", lock);
  }
  schedule_->submit(stream, std::move(task), lock);
}

// --- what waits for what ------------------------------------------------------------------------

Executor::Held Executor::held_by(const Task& head) {
  using Record = std::pair<const Event*, uint64_t>;
  Lock lock(queues_.mutex);
  Held held;
  std::set<Record> records;
  std::set<const Stream*> streams;
  const auto waits_for_held = [&](const Task& task) {
    const auto* wait = dynamic_cast<const EventWait*>(&task);
    return wait != nullptr && records.count({&wait->event(), wait->version()}) != 0;
  };
  for (bool again = true; again;) {
    again = false;
    for (const StreamPtr& stream : queues_.streams()) {
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
  faults::reach(faults::Kind::kEvent, "record");
  uint64_t version = 0;
  EventHoldPtr hold;
  {
    Lock lock(queues_.mutex);
    event->captured_in = stream->capture;
    observers_.tell(&Observer::on_record, *stream, *event);
    if (stream->capture != nullptr) {
      stream->capture->order.recorded(stream->id, event->id);
      return;
    }
    if (event->holds == Event::Holds::kWhileRecorded) {
      hold = hold_event(stream->device, lock);
    } else if (event->holds == Event::Holds::kForGood && event->hold == nullptr) {
      event->hold = hold_event(stream->device, lock);
    }
    version = event->add_record();
  }
  enqueue(stream, std::make_shared<EventRecord>(event, version, std::move(hold)));
}

EventHoldPtr Executor::hold_event(int device, Lock& lock) {
  DeviceLimits& limits = DeviceLimits::instance();
  const auto has_room = [&] { return limits.has_room(DeviceLimits::Kind::kEvents, device); };
  if (!has_room()) {
    wait_until(has_room, std::nullopt, "one of the device's events (EE1023 if it never comes)",
               lock);
  }
  return std::make_shared<EventHold>(device);
}

void Executor::wait(const StreamPtr& stream, const EventPtr& event) {
  uint64_t version = 0;
  const std::string site = observers_.call_site();
  {
    Lock lock(queues_.mutex);
    const GraphPtr graph = event->captured_in.lock();
    if (graph != nullptr && graph->state == CaptureState::kActive) {
      if (stream->capture != nullptr && stream->capture != graph) {
        throw CaptureFailure(
            CaptureRule::kOtherGraph,
            "vnpu: a stream that captures one graph waits for an event of another. The other "
            "capture began at" +
                graph->origin.call_site + "\n  Wait for it before the capture begins.");
      }
      stream->capture = graph;
      graph->order.waited(stream->id, event->id);
      observers_.tell(&Observer::on_wait, *stream, *event, site);
      return;
    }
    observers_.tell(&Observer::on_wait, *stream, *event, site);
    version = event->newest();
    if (event->reached(version)) {
      event->throw_if_failed(version);
      return;
    }
  }
  enqueue(stream, std::make_shared<EventWait>(event, version));
}

}  // namespace vnpu
