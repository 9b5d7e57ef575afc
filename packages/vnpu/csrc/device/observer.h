#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "device/call_site.h"
#include "device/touched.h"

namespace vnpu {

class Event;
class Graph;
class Stream;
class Task;

// Follows what happens on the devices of this process, like the race detector and the trace. The
// device knows none of them by name.
//
// All calls but on_wait_over() and the three on the course of a task come under the executor's
// lock, so that they see one order of what the program did; they must not call the executor. An
// exception reaches the program's call. `call_site` names the innermost lines of Python, if the
// observer needs them.
class Observer {
 public:
  // Data that costs time at each launch and is collected only if an observer needs it.
  struct Needs {
    bool accesses = false;    // Task::touched.accesses()
    bool call_sites = false;  // where in the program something was asked for; else empty
    bool deadlocks = false;   // whether ranks wait for each other in a circle
    bool work = false;        // Task::work
  };

  virtual ~Observer() = default;
  virtual Needs needs() const = 0;

  // --- what the program asks for, in its order -------------------------------------------------
  // A task is about to be queued, or kept if the stream captures (stream.capture).
  virtual void on_launch(const Stream&, const Task&, const std::string& /*call_site*/) {}
  virtual void on_record(const Stream&, const Event&) {}
  virtual void on_wait(const Stream&, const Event&, const std::string& /*call_site*/) {}
  virtual void on_capture_begin(const Graph&) {}
  virtual void on_capture_end(const Graph&) {}
  // A host thread has seen everything on the stream done, or the newest record of the event
  // reached.
  virtual void on_stream_synchronized(const Stream&, const std::string& /*call_site*/) {}
  virtual void on_event_synchronized(const Event&, const std::string& /*call_site*/) {}
  // A host thread has waited for the stream, for all streams of a device, or for the event's newest
  // record; a query does not count. Called before the two above.
  virtual void on_stream_waited(const Stream&) {}
  virtual void on_device_waited(const int& /*device*/) {}
  virtual void on_event_waited(const Event&) {}
  // After each of the three, on the thread that waited and without the executor's lock.
  virtual void on_wait_over() {}
  // The host frees device memory by this function, which waits for no stream.
  virtual void on_device_free(const void* /*begin*/, const size_t& /*bytes*/,
                              const char* /*function*/, const std::string& /*call_site*/) {}
  // The host frees pinned memory.
  virtual void on_host_free(const void* /*begin*/, size_t /*bytes*/,
                            const std::string& /*call_site*/) {}

  // Programs of one kernel access the same memory unordered; the text names both accesses.
  virtual void on_race(const std::string& /*text*/) {}
  // A task that tells its accesses (Task::tells_accesses) has ended, or failed, with these.
  virtual void on_accessed(const Task&, const std::vector<Access>&) {}

  // --- the course of a task, on the thread that runs it ----------------------------------------
  // Before each step(), and after it.
  virtual void on_advance(const Stream&, const Task&) {}
  virtual void on_blocked(const Stream&, const Task&) {}
  virtual void on_end(const Stream&, const Task&, bool /*failed*/) {}
  // The corresponding calls for a node of a graph, between the replay's own on_advance and its next
  // call. A node that fails does not end: the replay does.
  virtual void on_node_advance(const Task& /*node*/) {}
  virtual void on_node_end(const Task& /*node*/) {}

  // Ranks wait for each other forever; the text has the ranks, collectives and call sites.
  virtual void on_deadlock(const std::string& /*text*/) {}
};

// All observers. Without any, notifying of an event costs one comparison.
class Observers {
 public:
  // The process's observers, by its settings; never destroyed.
  static Observers& instance();

  // The observer must live as long as this object. One that needs something must be added before
  // the first task; one that needs nothing may be added later, during notifications too. Two
  // threads must not add at the same time.
  void add(Observer& observer);
  bool any() const { return count_.load(std::memory_order_acquire) > 0; }
  // The union of all observers' needs.
  const Observer::Needs& needs() const { return needs_; }

  // The innermost Python lines of the calling thread if an observer needs them, else empty at no
  // cost. Takes Python's lock: call it without any other.
  std::string call_site() const { return needs_.call_sites ? python_call_site() : std::string(); }

  // Calls `event` of each in the order in which they were added: tell(&Observer::on_record, s, e).
  template <class... P, class... A>
  void tell(void (Observer::*event)(P...), const A&... arguments) const {
    const size_t count = count_.load(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i) (all_[i]->*event)(arguments...);
  }

 private:
  // Observers of races, time, its variants and traces, one per profiler (two), and one for the
  // callback of failed tasks.
  static constexpr size_t kMost = 7;
  std::array<Observer*, kMost> all_ = {};
  std::atomic<size_t> count_{0};
  Observer::Needs needs_;
};

// Adds the observers that the settings of this process ask for: observers.cpp, not the device's.
void add_observers(Observers& observers);

}  // namespace vnpu
