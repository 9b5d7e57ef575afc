#include "device/graph.h"

#include <string_view>

#include "device/device_limits.h"
#include "device/observer.h"

namespace vnpu {
namespace {

uint32_t next_graph_id() {
  static std::atomic<uint32_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Resources held by all live graphs.
class TotalHeld {
 public:
  void add(const GraphHoldings& held, int sign) {
    const std::lock_guard lock(mutex_);
    total_.graphs += sign * held.graphs;
    total_.streams += sign * held.streams;
    total_.events += sign * held.events;
    total_.updatable_tasks += sign * held.updatable_tasks;
  }
  GraphHoldings now() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }

 private:
  mutable std::mutex mutex_;
  GraphHoldings total_;
};

TotalHeld& all_held() {
  static auto* const held = new TotalHeld();  // graphs may outlive the end of main
  return *held;
}

}  // namespace

Graph::Graph(CaptureOrigin origin, int device)
    : id(next_graph_id()), origin(std::move(origin)), device_(device) {}

Graph::~Graph() {
  if (is_counted_) all_held().add(holdings(), -1);
  DeviceLimits::instance().give(DeviceLimits::Kind::kStreams, device_, streams_);
  DeviceLimits::instance().give(DeviceLimits::Kind::kEvents, device_, events_);
}

GraphHoldings Graph::holdings() const {
  int tasks = 0;
  for (const auto& group : groups) tasks += static_cast<int>(group->end - group->begin);
  return {1, order.num_streams(), order.num_records(), tasks};
}

GraphHoldings Graph::held_by_all() { return all_held().now(); }

void Graph::count() {
  is_counted_ = true;
  all_held().add(holdings(), 1);
}

void Graph::take_resources() {
  const std::lock_guard lock(mutex_);
  if (streams_ > 0) return;
  const GraphHoldings held = holdings();
  DeviceLimits& limits = DeviceLimits::instance();
  limits.take(DeviceLimits::Kind::kEvents, device_, held.events);
  try {
    limits.take(DeviceLimits::Kind::kStreams, device_, held.streams);
  } catch (...) {
    limits.give(DeviceLimits::Kind::kEvents, device_, held.events);
    throw;
  }
  streams_ = held.streams;
  events_ = held.events;
}

Access Graph::TaskGroup::access(bool write) const {
  // An address of the host's, where no device memory is.
  const auto address = reinterpret_cast<uintptr_t>(this);
  return {address, address + sizeof(TaskGroup), write};
}

void Graph::append(TaskPtr task, int stream) {
  std::lock_guard lock(mutex_);
  streams_of_nodes_.push_back(stream);
  if (std::string_view(task->name) == "value wait") has_gates_ = true;
  nodes_.push_back(std::move(task));
}

void Graph::replace(size_t index, TaskPtr task) {
  std::lock_guard lock(mutex_);
  nodes_.at(index) = std::move(task);
}

TaskPtr Graph::node(size_t index) const {
  std::lock_guard lock(mutex_);
  return index < nodes_.size() ? nodes_[index] : nullptr;
}

int Graph::stream_of_node(size_t index) const {
  std::lock_guard lock(mutex_);
  return streams_of_nodes_.at(index);
}

size_t Graph::size() const {
  std::lock_guard lock(mutex_);
  return nodes_.size();
}

GraphReplay::GraphReplay(GraphPtr graph) : Task("graph replay"), graph_(std::move(graph)) {
  graph_->take_resources();
  ++graph_->replays;
  if (!Touched::keeps_accesses) return;
  for (size_t i = 0; i < graph_->size(); ++i) touched.add_accesses_of(graph_->node(i)->touched);
  if (graph_->has_gates()) return;  // they order updates against what follows inside
  Touched groups;
  for (const auto& group : graph_->groups) groups.add(group->access(false));
  touched.add_accesses_of(groups);
}

GraphReplay::~GraphReplay() { end(); }

void GraphReplay::end() {
  if (!std::exchange(ended_, true)) --graph_->replays;
}

Progress GraphReplay::advance() {
  const Observers& observers = Observers::instance();
  try {
    for (;;) {
      if (current_ == nullptr) {
        current_ = graph_->node(next_);
        if (current_ == nullptr) break;
        current_->rewind();
      }
      observers.tell(&Observer::on_node_advance, *current_);
      if (current_->step() == Progress::kBlocked) return Progress::kBlocked;
      observers.tell(&Observer::on_node_end, *current_);
      ++next_;
      current_ = nullptr;
    }
  } catch (...) {
    end();
    throw;
  }
  end();
  return Progress::kDone;
}

void GraphReplay::wait(std::chrono::microseconds limit) {
  if (current_ != nullptr) current_->wait(limit);
}

bool GraphReplay::waits_outside() const { return current_ != nullptr && current_->waits_outside(); }

std::string GraphReplay::waiting_for() const {
  return current_ == nullptr
             ? "its turn"
             : std::string(current_->name) + " in graph " + std::to_string(graph_->id) +
                   ", which waits for " + current_->waiting_for();
}

GraphUpdate::GraphUpdate(std::shared_ptr<Graph::TaskGroup> group, std::vector<TaskPtr> tasks)
    : Task("graph update"), group_(std::move(group)), tasks_(std::move(tasks)) {
  if (!Touched::keeps_accesses) return;
  const GraphPtr graph = group_->graph.lock();
  if (graph != nullptr && !graph->has_gates()) touched.add(group_->access(true));
}

Progress GraphUpdate::advance() {
  if (const GraphPtr graph = group_->graph.lock(); graph != nullptr) {
    for (size_t i = 0; i < tasks_.size(); ++i) graph->replace(group_->begin + i, tasks_[i]);
  }
  return Progress::kDone;
}

}  // namespace vnpu
