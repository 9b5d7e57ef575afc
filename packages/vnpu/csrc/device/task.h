#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "device/cores.h"
#include "device/touched.h"

namespace vnpu {

namespace timing {
struct Work;  // timing/work.h
}

enum class Progress {
  kDone,
  kBlocked,  // waits for something: another stream, another rank, the host
};

// One piece of work on a stream: an operator, a copy, an event record or wait, a collective.
class Task {
 public:
  explicit Task(const char* name) : name(name) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // Does the work, or as much as can be done now; called again until it is done. Throws Failure.
  // When it ends, also by a failure, watchers of the memory that it writes are notified.
  Progress step();
  // After kBlocked: sleeps until step() may get further, at most `limit`.
  virtual void wait(std::chrono::microseconds limit) { std::this_thread::sleep_for(limit); }
  // True if the task waits for something outside this process's streams.
  virtual bool waits_outside() const { return false; }
  // True if it is work of a whole step: the host should continue meanwhile, as with a chip.
  virtual bool is_long() const { return false; }
  // For reports: "event 7 of stream 3", "rank 1 of group world (all_reduce #12)".
  virtual std::string waiting_for() const { return "its turn"; }
  // Makes a finished task runnable again (graph replay).
  virtual void rewind() {}

  // True if an observer needs operators' work.
  static bool keeps_work;

  const char* const name;
  Touched touched;
  // Work of an operator; null for other tasks, and if its row has no cost.
  std::shared_ptr<const timing::Work> work;
  // An operator's; nothing where it may take all of the chip's.
  std::optional<Cores> cores;
  // True if the task's accesses are known only when it ends, by Observer::on_accessed.
  bool tells_accesses = false;

 protected:
  virtual Progress advance() = 0;
};

using TaskPtr = std::shared_ptr<Task>;

}  // namespace vnpu
