#include "device/graph_course.h"

#include <algorithm>
#include <cstring>

#include "device/failure.h"
#include "device/memory.h"

namespace vnpu {

LabelSwitch::LabelSwitch(const void* index, std::vector<GraphLabelPtr> labels)
    : Task("label switch"), index_(index), labels_(std::move(labels)) {
  const auto begin = reinterpret_cast<uintptr_t>(index);
  touched.add({begin, begin + sizeof(uint32_t), false});
}

Progress LabelSwitch::advance() {
  uint32_t chosen = 0;
  std::memcpy(&chosen, Memory::instance().backing(static_cast<const char*>(index_)),
              sizeof(chosen));
  const size_t number = std::min<size_t>(chosen, labels_.size() - 1);
  target_ = labels_[number];
  if (target_->node == GraphLabel::kNowhere) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a switch leads to label " + std::to_string(number) + " of " +
                      std::to_string(labels_.size()) + ", which no stream of its graph has set.");
  }
  return Progress::kDone;
}

GraphCourse::GraphCourse(const Graph& graph, const std::map<int, bool>& bound,
                         std::vector<int> streams)
    : graph_(graph), streams_(std::move(streams)) {
  for (const auto& [stream, runs] : bound) lines_[stream].runs = runs;
  for (size_t i = 0; i < streams_.size(); ++i) lines_[streams_[i]].nodes.push_back(i);
}

size_t GraphCourse::next() const {
  size_t first = streams_.size();
  for (const auto& [stream, line] : lines_) {
    if (line.runs && line.next < line.nodes.size()) first = std::min(first, line.nodes[line.next]);
  }
  return first;
}

void GraphCourse::pass(size_t node, const Task& task) {
  Line& own = lines_[streams_[node]];
  ++own.next;
  const auto* leap = dynamic_cast<const LabelSwitch*>(&task);
  if (leap == nullptr) return;
  const GraphLabel& label = leap->target();
  if (label.graph.lock().get() != &graph_) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a switch of a graph leads to a label in another graph.");
  }
  own.runs = false;
  Line& other = lines_[streams_[label.node]];
  other.runs = true;
  const auto place = std::ranges::lower_bound(other.nodes, label.node);
  other.next = static_cast<size_t>(place - other.nodes.begin());
}

}  // namespace vnpu
