#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device/task.h"

namespace vnpu {

enum class CaptureState { kActive, kInvalidated, kReady };

// Work captured from one or more streams, in the order of capture: a correct serialisation, since a
// task can only be captured after everything it depends on.
class Graph {
 public:
  Graph();

  // A run of nodes that later launches may replace.
  struct TaskGroup {
    std::weak_ptr<Graph> graph;
    size_t begin;
    size_t end;
  };

  void append(TaskPtr task);
  void replace(size_t index, TaskPtr task);
  TaskPtr node(size_t index) const;  // null past the end
  size_t size() const;

  const uint32_t id;
  CaptureState state = CaptureState::kActive;
  size_t open_group_begin = 0;

 private:
  mutable std::mutex mutex_;
  std::vector<TaskPtr> nodes_;
};

using GraphPtr = std::shared_ptr<Graph>;

// Runs the nodes of a graph on the launching stream.
class GraphReplay final : public Task {
 public:
  explicit GraphReplay(GraphPtr graph);
  void wait(std::chrono::microseconds limit) override;
  bool waits_outside() const override;
  std::string waiting_for() const override;

 private:
  Progress advance() override;

  GraphPtr graph_;
  size_t next_ = 0;
  TaskPtr current_;
};

}  // namespace vnpu
