#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "device/event.h"
#include "device/observer.h"
#include "device/touched.h"
#include "race/host_memory.h"
#include "race/launch.h"
#include "race/vector_clock.h"

namespace vnpu::race {

// Finds pairs of launches that use the same memory, at least one of them writing, without an order
// by a stream, an event or the host. The findings depend on the program alone, not on the order in
// which tasks ran.
//
// The host counts as one more stream: what it launches comes after everything it has waited for. It
// must not change pinned memory that a copy may still read, nor free device memory that launches
// may still use. Waits and queries of a library's own thread, such as a watchdog, do not count.
// Inside a capture the same rules hold among the captured launches; a replay is one launch that
// uses all memory of its nodes.
class Detector final : public Observer {
 public:
  // Null when VNPU_RACES is off.
  static Detector* instance();

  explicit Detector(bool raises);
  ~Detector() override;

  Needs needs() const override { return {.accesses = true, .call_sites = true, .deadlocks = true}; }
  void on_launch(const Stream& stream, const Task& task, const std::string& call_site) override;
  void on_record(const Stream& stream, const Event& event) override;
  void on_wait(const Stream& stream, const Event& event, const std::string& call_site) override;
  void on_capture_begin(const Graph& graph) override;
  void on_capture_end(const Graph& graph) override;
  void on_stream_synchronized(const Stream& stream, const std::string& call_site) override;
  void on_event_synchronized(const Event& event, const std::string& call_site) override;
  void on_device_free(const void* begin, const size_t& bytes, const char* function,
                      const std::string& call_site) override;
  void on_race(const std::string& text) override { say(text, text); }
  void on_accessed(const Task& task, const std::vector<Access>& accesses) override;
  void on_host_free(const void* begin, size_t bytes, const std::string& call_site) override;
  // Printed in every mode: not every error of a wait reaches the program with its text.
  void on_deadlock(const std::string& text) override;

  uint64_t found() const { return found_; }

 private:
  struct Use {
    Access access;
    LaunchPtr launch;
  };
  // Launches that order each other: the process, or one capture.
  struct Scope {
    std::unordered_map<int, VectorClock> streams;
    std::unordered_map<int, uint64_t> launched;
    std::unordered_map<uint64_t, VectorClock> events;
    VectorClock host;
    // Uses that a later launch might conflict with, in buckets of address space.
    std::unordered_map<uintptr_t, std::vector<Use>> uses;
  };

  Scope& scope_of(const Stream& stream);
  // Tasks that the calling thread knows to have finished.
  VectorClock& seen_by_this_thread();
  void check(Scope& scope, const VectorClock& now, const Use& use);
  void use_host_memory(const Access& access, const LaunchPtr& launch);
  void report(const Use& earlier, const Use& later);
  void report_freed(const Use& use, const char* function, const std::string& call_site);
  // Reports that the host did `what` to the memory of these reads before it knew them finished, at
  // this place.
  void report(const std::vector<HostMemory::Read>& reads, const char* what,
              const std::string& call_site);
  void at_exit();
  void say(const std::string& key, const std::string& text);

  const bool raises_;
  Scope process_;
  std::map<const Graph*, Scope> captures_;
  // Waits of libraries' own threads, which do not order the program's accesses.
  std::map<std::thread::id, VectorClock> library_threads_;
  HostMemory host_memory_;  // captured launches count only when they are replayed
  // Launches whose accesses are not reported yet. Until they are, superseded uses are kept as well,
  // so that findings do not depend on when accesses are reported.
  std::map<const Task*, LaunchPtr> untold_;
  std::set<std::string> said_;
  uint64_t found_ = 0;
};

}  // namespace vnpu::race
