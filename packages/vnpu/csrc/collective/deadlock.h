#pragma once

#include <chrono>
#include <memory>
#include <vector>

namespace vnpu {

class Collective;
class Group;

// While a collective waits for other ranks: tells them what of other groups is held up behind it on
// this rank, and finds the rank that waits for just that, while what it owes here is held up behind
// its own wait. No such pair of collectives can ever end. Longer circles, among three ranks and
// three groups, end at the time limit.
class DeadlockWatch {
 public:
  ~DeadlockWatch() { end(); }

  // `waiting` has waited since `begin`. Fails both groups in a deadlock, and throws.
  void look(const Collective& waiting, std::chrono::steady_clock::time_point begin);
  // It waits no longer.
  void end();

 private:
  std::chrono::steady_clock::time_point looked_{};
  std::vector<std::shared_ptr<Group>> told_;
};

}  // namespace vnpu
