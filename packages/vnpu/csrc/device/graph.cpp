#include "device/graph.h"

#include <atomic>

namespace vnpu {
namespace {

uint32_t next_graph_id() {
  static std::atomic<uint32_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Graph::Graph() : id(next_graph_id()) {}

void Graph::append(TaskPtr task) {
  std::lock_guard lock(mutex_);
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

size_t Graph::size() const {
  std::lock_guard lock(mutex_);
  return nodes_.size();
}

GraphReplay::GraphReplay(GraphPtr graph) : Task("graph replay"), graph_(std::move(graph)) {
  if (!Touched::keeps_accesses) return;
  for (size_t i = 0; i < graph_->size(); ++i) touched.add_accesses_of(graph_->node(i)->touched);
}

Progress GraphReplay::advance() {
  for (;;) {
    if (current_ == nullptr) {
      current_ = graph_->node(next_);
      if (current_ == nullptr) return Progress::kDone;
      current_->rewind();
    }
    if (current_->step() == Progress::kBlocked) return Progress::kBlocked;
    current_ = nullptr;
    ++next_;
  }
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

}  // namespace vnpu
