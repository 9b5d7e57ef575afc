#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "device/task.h"

namespace vnpu {

class Group;

// A waiting task of a group, as the other ranks see it.
class GroupTask : public Task {
 public:
  using Task::Task;
  virtual const std::shared_ptr<Group>& member() const = 0;
  virtual uint64_t sequence() const = 0;
  // Empty unless an observer needs it.
  virtual const std::string& call_site() const = 0;
  virtual bool waits_for(uint32_t rank) const = 0;
  // "all_reduce #12"
  virtual std::string title() const = 0;
};

// Detects two ranks that wait for each other in collectives of two groups: a collective that waits
// publishes which collectives of other groups are queued behind it on this rank. In a deadlock
// another rank waits in one of those, and has queued the first collective behind it. Cycles of
// three ranks and three groups end at the time limit.
class DeadlockWatch {
 public:
  ~DeadlockWatch() { end(); }

  // `waiting` has waited since `begin`. Fails both groups in a deadlock, and throws.
  void look(const GroupTask& waiting, std::chrono::steady_clock::time_point begin);
  // It waits no longer.
  void end();

 private:
  std::chrono::steady_clock::time_point looked_{};
  std::vector<std::shared_ptr<Group>> told_;
};

}  // namespace vnpu
