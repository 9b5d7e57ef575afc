// Streams that capture: what they launch goes into a graph and not to the device.

#include <utility>

#include "device/executor.h"

namespace vnpu {

GraphPtr Executor::begin_capture(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture != nullptr) {
    throw Failure(FailureKind::kCaptureConflict, "vnpu: this stream captures already.");
  }
  stream->capture = std::make_shared<Graph>();
  stream->capture_origin = true;
  observers_.tell(&Observer::on_capture_begin, *stream->capture);
  return stream->capture;
}

GraphPtr Executor::capture_of(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  return stream->capture;
}

GraphPtr Executor::end_capture(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture == nullptr || !stream->capture_origin) {
    throw Failure(FailureKind::kCaptureConflict,
                  "vnpu: a capture must end on the stream on which it began.");
  }
  const GraphPtr graph = stream->capture;
  graph->state = CaptureState::kReady;
  observers_.tell(&Observer::on_capture_end, *graph);
  for (const StreamPtr& each : queues_.streams()) {
    if (each->capture == graph) {
      each->capture = nullptr;
      each->capture_origin = false;
    }
  }
  return graph;
}

void Executor::begin_group(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture == nullptr) {
    throw Failure(FailureKind::kCaptureConflict, "vnpu: a task group needs a capturing stream.");
  }
  stream->capture->open_group_begin = stream->capture->size();
}

std::shared_ptr<Graph::TaskGroup> Executor::end_group(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture == nullptr) {
    throw Failure(FailureKind::kCaptureConflict, "vnpu: a task group needs a capturing stream.");
  }
  const GraphPtr& graph = stream->capture;
  return std::make_shared<Graph::TaskGroup>(
      Graph::TaskGroup{graph, graph->open_group_begin, graph->size()});
}

void Executor::begin_update(const StreamPtr& stream, std::shared_ptr<Graph::TaskGroup> group) {
  const Lock lock(queues_.mutex);
  if (stream->update != nullptr || stream->capture != nullptr) {
    throw Failure(FailureKind::kCaptureConflict,
                  "vnpu: this stream captures or updates a task group already.");
  }
  stream->update_next = group->begin;
  stream->update = std::move(group);
}

void Executor::end_update(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->update == nullptr) {
    throw Failure(FailureKind::kCaptureConflict, "vnpu: this stream updates no task group.");
  }
  stream->update = nullptr;
}

}  // namespace vnpu
