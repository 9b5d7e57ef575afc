// Graphs that are built from streams, which a program binds to them: what those launch goes into
// the graph until it is whole. And events by which graphs and streams outside of them wait for each
// other.

#include <algorithm>
#include <map>

#include "device/executor.h"
#include "device/graph_course.h"

namespace vnpu {
namespace {

// Whether each stream that is bound so far runs from the begin.
std::map<int, bool>& bound_so_far(Graph& graph) {
  if (graph.bound.has_value() && graph.state == CaptureState::kActive) return *graph.bound;
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: graph " + std::to_string(graph.id) +
                    " is not being built: it was captured, or is whole already.");
}

void check_is_bound(const Stream& stream, const Graph& graph) {
  if (graph.bound.has_value() && graph.bound->count(stream.id) != 0) return;
  throw Failure(FailureKind::kInvalidArgument, "vnpu: stream " + std::to_string(stream.id) +
                                                   " is not bound to graph " +
                                                   std::to_string(graph.id) + ".");
}

}  // namespace

GraphPtr Executor::begin_build(int device) {
  const auto graph = std::make_shared<Graph>(CaptureOrigin{.mode = CaptureMode::kRelaxed}, device);
  graph->bound.emplace();
  const Lock lock(queues_.mutex);
  observers_.tell(&Observer::on_capture_begin, *graph);
  return graph;
}

void Executor::bind(const StreamPtr& stream, const GraphPtr& graph, bool is_head) {
  const Lock lock(queues_.mutex);
  std::map<int, bool>& bound = bound_so_far(*graph);
  if (stream->capture != nullptr) {
    throw CaptureFailure(CaptureRule::kCapturing, "vnpu: stream " + std::to_string(stream->id) +
                                                      " captures already, or is bound to a graph.");
  }
  if (graph->origin_stream < 0) graph->origin_stream = stream->id;
  bound[stream->id] = is_head;
  stream->capture = graph;
}

void Executor::unbind(const StreamPtr& stream, const GraphPtr& graph) {
  const Lock lock(queues_.mutex);
  check_is_bound(*stream, *graph);
  if (stream->capture == graph) stream->capture = nullptr;
}

void Executor::end_tasks(const StreamPtr& stream, const GraphPtr& graph) {
  const Lock lock(queues_.mutex);
  bound_so_far(*graph);
  check_is_bound(*stream, *graph);
}

void Executor::end_build(const GraphPtr& graph) {
  const Lock lock(queues_.mutex);
  bound_so_far(*graph);
  graph->state = CaptureState::kReady;
  observers_.tell(&Observer::on_capture_end, *graph);
  for (const StreamPtr& each : queues_.streams()) {
    if (each->capture == graph) each->capture = nullptr;
  }
  graph->count();
}

void Executor::set_label(const StreamPtr& stream, const GraphLabelPtr& label) {
  const std::string site = observers_.call_site();
  const Lock lock(queues_.mutex);
  const GraphPtr graph = stream->capture;
  if (graph == nullptr || !graph->bound.has_value()) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: a label is set on stream " +
                                                     std::to_string(stream->id) +
                                                     ", which is bound to no graph.");
  }
  if (label->node != GraphLabel::kNowhere && !label->graph.expired()) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a label is set twice; it stands for one place.");
  }
  TaskPtr mark = std::make_shared<LabelMark>();
  keep(stream, mark, site);
  *label = {graph, graph->size() - 1};
}

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
