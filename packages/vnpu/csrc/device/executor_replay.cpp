// Replays of graphs, and events by which graphs and streams outside of them wait for each other.

#include <algorithm>

#include "device/executor.h"

namespace vnpu {

void Executor::add_external(const StreamPtr& stream, const EventPtr& event, bool is_record) {
  const Lock lock(queues_.mutex);
  const GraphPtr graph = stream->capture;
  if (graph == nullptr) {
    throw CaptureFailure(CaptureRule::kNotCapturing,
                         "vnpu: an event is external to a capture, and the stream captures "
                         "nothing.");
  }
  for (const auto* events : {&graph->external_waits, &graph->external_records}) {
    if (std::ranges::count(*events, event) == 0) continue;
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a capture uses an event twice as an external one; it may once.");
  }
  (is_record ? graph->external_records : graph->external_waits).push_back(event);
}

void Executor::replay(const StreamPtr& stream, const GraphPtr& graph) {
  for (const EventPtr& event : graph->external_waits) wait(stream, event);
  submit(stream, std::make_shared<GraphReplay>(graph));
  for (const EventPtr& event : graph->external_records) record(stream, event);
}

}  // namespace vnpu
