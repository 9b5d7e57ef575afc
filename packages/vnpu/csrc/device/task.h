#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace vnpu {

// Device memory that a task reads or writes: [begin, end), of which a strided tensor touches the
// elements that `layout` names (dims == 0: every byte).
struct Access {
  struct Layout {
    int dims = 0;
    int64_t item = 0;  // bytes of one element
    int64_t sizes[8] = {};
    int64_t strides[8] = {};  // bytes
    int64_t first = 0;        // bytes from begin to element 0
  };
  uintptr_t begin;
  uintptr_t end;
  bool write;
  Layout layout = {};
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

  // Whether anybody looks at accesses: collecting them costs time at each launch.
  static bool collects_accesses;

  const char* const name;
  std::vector<Access> accesses;
};

using TaskPtr = std::shared_ptr<Task>;

}  // namespace vnpu
