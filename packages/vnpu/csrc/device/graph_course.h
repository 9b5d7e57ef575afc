#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "device/task.h"

namespace vnpu {

class Graph;

// A place in a graph that was built from streams, from which a switch lets the place's stream run.
struct GraphLabel {
  static constexpr size_t kNowhere = ~size_t{0};
  std::weak_ptr<Graph> graph;
  size_t node = kNowhere;
};

using GraphLabelPtr = std::shared_ptr<GraphLabel>;

// Where a label stands.
class LabelMark final : public Task {
 public:
  LabelMark() : Task("label") {}

 private:
  Progress advance() override { return Progress::kDone; }
};

// Ends the work of its stream, and lets that of a label's stream run from the label on.
class LabelSwitch final : public Task {
 public:
  // index: device address of a uint32 that is read when the stream gets here; one past the last
  // label stands for that
  LabelSwitch(const void* index, std::vector<GraphLabelPtr> labels);
  // Where it has led to.
  const GraphLabel& target() const { return *target_; }

 private:
  // Throws kInvalidArgument where the label stands nowhere.
  Progress advance() override;

  const void* index_;
  std::vector<GraphLabelPtr> labels_;
  GraphLabelPtr target_;
};

// The order of a replay's nodes where a graph was built from streams: of those that run, the one
// that was launched first.
class GraphCourse {
 public:
  // bound: the graph's streams, and whether each runs from the begin; streams: of each node
  GraphCourse(const Graph& graph, const std::map<int, bool>& bound, std::vector<int> streams);
  // The next node; the graph's size where none is left.
  size_t next() const;
  // The node is done. Throws kInvalidArgument where it has led to another graph.
  void pass(size_t node, const Task& task);

 private:
  struct Line {
    std::vector<size_t> nodes;  // of one stream
    size_t next = 0;            // in `nodes`
    bool runs = false;
  };

  const Graph& graph_;
  std::vector<int> streams_;   // of each node
  std::map<int, Line> lines_;  // by stream
};

}  // namespace vnpu
