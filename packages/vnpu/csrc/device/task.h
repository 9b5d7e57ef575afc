#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace vnpu {

// One range of device memory that a task reads or writes.
struct Access {
  uintptr_t begin;
  uintptr_t end;
  bool write;
};

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
  virtual Progress advance() = 0;
  // After kBlocked: sleeps until advance() may get further, at most `limit`.
  virtual void wait(std::chrono::microseconds limit) { std::this_thread::sleep_for(limit); }
  // True if what the task waits for lies outside this process's streams.
  virtual bool waits_outside() const { return false; }
  // For reports: "event 7 of stream 3", "rank 1 of group world (all_reduce #12)".
  virtual std::string waiting_for() const { return "its turn"; }
  // Makes a finished task runnable again (graph replay).
  virtual void rewind() {}

  const char* const name;
  std::vector<Access> accesses;
};

using TaskPtr = std::shared_ptr<Task>;

}  // namespace vnpu
