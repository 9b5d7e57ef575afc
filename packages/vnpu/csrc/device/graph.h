#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "device/capture.h"
#include "device/task.h"

namespace vnpu {

class Event;

enum class CaptureState { kActive, kReady };

// Device resources that a graph holds while it lives.
struct GraphHoldings {
  int graphs = 0;
  int streams = 0;
  int events = 0;  // one for each record
  int updatable_tasks = 0;
};

// Work captured from one or more streams, in the order of capture: a correct serialisation, since a
// task can only be captured after everything it depends on.
class Graph {
 public:
  explicit Graph(CaptureOrigin origin, int device = 0);
  ~Graph();

  // A run of nodes that later launches may replace.
  struct TaskGroup {
    std::weak_ptr<Graph> graph;
    size_t begin;
    size_t end;
    // Address that stands for the group's nodes in the race detector: updates write it, replays
    // read it.
    Access access(bool write) const;
  };

  void append(TaskPtr task, int stream = -1);
  void replace(size_t index, TaskPtr task);
  TaskPtr node(size_t index) const;  // null past the end
  int stream_of_node(size_t index) const;
  size_t size() const;
  // Before the first execution: throws kTooManyStreams or kTooManyEvents where the device has too
  // few.
  void take_resources();
  GraphHoldings holdings() const;
  // Called when the capture is complete: the graph counts in `held_by_all` until it is destroyed.
  void count();
  static GraphHoldings held_by_all();
  // True if nodes wait for updates during a replay.
  bool has_gates() const { return has_gates_; }

  const uint32_t id;
  const CaptureOrigin origin;
  CaptureState state = CaptureState::kActive;

  // While capturing, under the executor's lock.
  CaptureOrder order;
  int origin_stream = -1;
  int group_stream = -1;  // that has a task group open
  size_t open_group_begin = 0;
  std::vector<std::shared_ptr<TaskGroup>> groups;

  std::atomic<int> replays{0};  // that are not over

 private:
  mutable std::mutex mutex_;
  const int device_;
  int streams_ = 0;  // taken of the device
  int events_ = 0;   // likewise
  bool is_counted_ = false;
  std::vector<TaskPtr> nodes_;
  std::vector<int> streams_of_nodes_;
  std::atomic<bool> has_gates_{false};
};

using GraphPtr = std::shared_ptr<Graph>;

// Runs the nodes of a graph on the launching stream.
class GraphReplay final : public Task {
 public:
  explicit GraphReplay(GraphPtr graph);
  ~GraphReplay() override;
  void wait(std::chrono::microseconds limit) override;
  bool waits_outside() const override;
  bool is_long() const override { return true; }
  std::string waiting_for() const override;
  const Graph& graph() const { return *graph_; }

 private:
  Progress advance() override;
  void end();

  GraphPtr graph_;
  size_t next_ = 0;
  TaskPtr current_;
  bool ended_ = false;
};

// Replaces the tasks of a group's nodes when its stream reaches the update. If nothing orders the
// update after a replay, it changes the running replay.
class GraphUpdate final : public Task {
 public:
  GraphUpdate(std::shared_ptr<Graph::TaskGroup> group, std::vector<TaskPtr> tasks);
  size_t size() const { return tasks_.size(); }

 private:
  Progress advance() override;

  std::shared_ptr<Graph::TaskGroup> group_;
  std::vector<TaskPtr> tasks_;
};

}  // namespace vnpu
