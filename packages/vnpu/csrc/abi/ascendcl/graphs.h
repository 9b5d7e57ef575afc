#pragma once

#include <map>
#include <mutex>

#include "abi/ascendcl/declarations.h"

namespace vnpu::abi {

// Graphs that have a handle (an aclmdlRI is the Graph's address).
class Graphs {
 public:
  static Graphs& instance() {
    static Graphs* const graphs = new Graphs();
    return *graphs;
  }
  void add(const GraphPtr& graph) {
    std::lock_guard lock(mutex_);
    live_[graph.get()] = graph;
  }
  GraphPtr find(aclmdlRI handle) {
    std::lock_guard lock(mutex_);
    const auto it = live_.find(handle);
    if (it == live_.end()) {
      throw Failure(FailureKind::kInvalidHandle, "vnpu: this is not a live graph.");
    }
    return it->second;
  }
  void remove(aclmdlRI handle) {
    if (find(handle)->replays > 0) {
      throw CaptureFailure(CaptureRule::kRunning,
                           "vnpu: a graph is destroyed while a replay of it is queued or runs. "
                           "Synchronise its stream first.");
    }
    std::lock_guard lock(mutex_);
    live_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::map<const void*, GraphPtr> live_;
};

}  // namespace vnpu::abi
