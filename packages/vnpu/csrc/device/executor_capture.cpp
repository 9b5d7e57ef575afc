// Streams that capture: what they launch goes into a graph and not to the device.

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/executor.h"

namespace vnpu {
namespace {

std::string since(const Graph& graph) {
  return "\n  The capture began at" + graph.origin.call_site;
}

}  // namespace

GraphPtr Executor::begin_capture(const StreamPtr& stream, CaptureMode mode) {
  CaptureOrigin origin{.mode = mode, .call_site = python_call_site()};
  if (origin.call_site.empty()) origin.call_site = "\n      (no Python frame)";
  const Lock lock(queues_.mutex);
  if (stream->capture != nullptr) {
    throw CaptureFailure(CaptureRule::kCapturing,
                         "vnpu: this stream captures already." + since(*stream->capture));
  }
  const GraphPtr graph = std::make_shared<Graph>(std::move(origin), stream->device);
  graph->origin_stream = stream->id;
  stream->capture = graph;
  stream->capture_origin = true;
  captures_.push_back(graph);
  capturing_ = captures_.size();
  observers_.tell(&Observer::on_capture_begin, *graph);
  return graph;
}

GraphPtr Executor::capture_of(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  return stream->capture;
}

GraphPtr Executor::end_capture(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture == nullptr) {
    throw CaptureFailure(CaptureRule::kNotCapturing,
                         "vnpu: a capture ends on a stream that captures nothing.");
  }
  const GraphPtr graph = stream->capture;
  if (!stream->capture_origin) {
    throw CaptureFailure(
        CaptureRule::kOtherOrigin,
        "vnpu: a capture must end on the stream on which it began." + since(*graph));
  }
  if (graph->origin.mode != CaptureMode::kRelaxed &&
      graph->origin.thread != std::this_thread::get_id()) {
    throw CaptureFailure(
        CaptureRule::kOtherThread,
        "vnpu: a capture must end on the thread on which it began, or be relaxed." + since(*graph));
  }
  graph->state = CaptureState::kReady;
  observers_.tell(&Observer::on_capture_end, *graph);
  for (const StreamPtr& each : queues_.streams()) {
    if (each->capture == graph) {
      each->capture = nullptr;
      each->capture_origin = false;
    }
  }
  std::erase(captures_, graph);
  capturing_ = captures_.size();
  if (graph->group_stream >= 0) {
    throw CaptureFailure(CaptureRule::kGroup,
                         "vnpu: a capture ends with a task group that is "
                         "still open. End the group first." +
                             since(*graph));
  }
  if (const int side = graph->order.unjoined(stream->id); side >= 0) {
    throw CaptureFailure(
        CaptureRule::kUnjoined,
        "vnpu: stream " + std::to_string(side) +
            " took part in a capture and has launches that the capture's first stream, " +
            std::to_string(stream->id) +
            ", does not wait for: a replay could not tell when it is done. Record an event on the "
            "side stream after its last launch and let the first stream wait for it." +
            since(*graph));
  }
  graph->count();
  return graph;
}

bool Executor::keep(const StreamPtr& stream, TaskPtr& task, const std::string& call_site) {
  if (stream->update != nullptr) {
    const GraphPtr graph = stream->update->graph.lock();
    const size_t index = stream->update->begin + stream->updated.size();
    const size_t held = stream->update->end - stream->update->begin;
    if (graph == nullptr || index >= stream->update->end) {
      throw CaptureFailure(CaptureRule::kUpdate,
                           std::string("vnpu: ") + task->name +
                               " does not fit into the task group under update: the group holds " +
                               std::to_string(held) + " tasks.");
    }
    if (const TaskPtr old = graph->node(index); std::strcmp(old->name, task->name) != 0) {
      throw CaptureFailure(CaptureRule::kUpdate,
                           std::string("vnpu: task ") + std::to_string(stream->updated.size()) +
                               " of the task group under update is " + old->name +
                               " and would become " + task->name +
                               ". An update repeats number and kind of a group's tasks.");
    }
    stream->updated.push_back(std::move(task));
    return true;
  }
  if (stream->capture == nullptr) return false;
  Graph& graph = *stream->capture;
  if (graph.group_stream >= 0 && graph.group_stream != stream->id) {
    throw CaptureFailure(
        CaptureRule::kGroupInterrupted,
        std::string("vnpu: ") + task->name + " is launched on stream " +
            std::to_string(stream->id) + " while stream " + std::to_string(graph.group_stream) +
            " of the same capture has a task group open. End the group first." + since(graph));
  }
  observers_.tell(&Observer::on_launch, *stream, *task, call_site);
  graph.order.launched(stream->id);
  graph.append(std::move(task), stream->id);
  return true;
}

void Executor::begin_group(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture == nullptr) {
    throw CaptureFailure(CaptureRule::kNotCapturing,
                         "vnpu: a task group needs a capturing stream.");
  }
  Graph& graph = *stream->capture;
  if (graph.group_stream >= 0) {
    throw CaptureFailure(CaptureRule::kGroup,
                         "vnpu: a task group begins while stream " +
                             std::to_string(graph.group_stream) +
                             " of the same capture has one open. End that first." + since(graph));
  }
  graph.group_stream = stream->id;
  graph.open_group_begin = graph.size();
}

std::shared_ptr<Graph::TaskGroup> Executor::end_group(const StreamPtr& stream) {
  const Lock lock(queues_.mutex);
  if (stream->capture == nullptr) {
    throw CaptureFailure(CaptureRule::kNotCapturing,
                         "vnpu: a task group needs a capturing stream.");
  }
  const GraphPtr& graph = stream->capture;
  if (graph->group_stream != stream->id) {
    throw CaptureFailure(CaptureRule::kGroup,
                         "vnpu: a task group ends that this stream did not begin." + since(*graph));
  }
  graph->group_stream = -1;
  graph->groups.push_back(std::make_shared<Graph::TaskGroup>(
      Graph::TaskGroup{graph, graph->open_group_begin, graph->size()}));
  return graph->groups.back();
}

void Executor::begin_update(const StreamPtr& stream, std::shared_ptr<Graph::TaskGroup> group) {
  const Lock lock(queues_.mutex);
  if (stream->update != nullptr || stream->capture != nullptr) {
    throw CaptureFailure(CaptureRule::kGroup,
                         "vnpu: this stream captures or updates a task group already.");
  }
  const GraphPtr graph = group->graph.lock();
  if (graph == nullptr || graph->state != CaptureState::kReady) {
    throw CaptureFailure(CaptureRule::kUpdate,
                         "vnpu: a task group is updated whose graph is gone or still captured.");
  }
  stream->updated.clear();
  stream->update = std::move(group);
}

void Executor::end_update(const StreamPtr& stream) {
  std::shared_ptr<Graph::TaskGroup> group;
  std::vector<TaskPtr> tasks;
  {
    const Lock lock(queues_.mutex);
    if (stream->update == nullptr) {
      throw CaptureFailure(CaptureRule::kGroup, "vnpu: this stream updates no task group.");
    }
    group = std::exchange(stream->update, nullptr);
    tasks = std::exchange(stream->updated, {});
  }
  const size_t held = group->end - group->begin;
  if (tasks.size() != held) {
    throw CaptureFailure(CaptureRule::kUpdate,
                         "vnpu: an update of " + std::to_string(tasks.size()) +
                             " tasks for a group of " + std::to_string(held) +
                             ". An update repeats number and kind of a group's tasks.");
  }
  enqueue(stream, std::make_shared<GraphUpdate>(std::move(group), std::move(tasks)));
}

void Executor::check_synchronous(CaptureMode mode, const char* what) {
  if (capturing_ == 0 || mode == CaptureMode::kRelaxed) return;
  const Lock lock(queues_.mutex);
  for (const GraphPtr& graph : captures_) {
    const bool minds = graph->origin.mode == CaptureMode::kGlobal ||
                       (graph->origin.mode == CaptureMode::kThreadLocal &&
                        graph->origin.thread == std::this_thread::get_id());
    if (!minds) continue;
    throw CaptureFailure(CaptureRule::kSynchronousCopy,
                         std::string("vnpu: ") + what +
                             " makes the host wait, which no thread may do during a capture. Use "
                             "pinned host memory and non_blocking=True, or do it before the "
                             "capture." +
                             since(*graph));
  }
}

}  // namespace vnpu
