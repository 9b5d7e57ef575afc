#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <unordered_map>

#include "device/observer.h"
#include "trace/timeline.h"

namespace vnpu::trace {

// Category of a task, by its type and name.
Category category_of(const Task& task);

// Follows every task of this process from launch to end by the host's steady clock, which all
// processes of a host share, and hands it to a timeline [VNPU_TRACE: a directory, in which each
// process writes a file named after its number].
class Recorder final : public Observer {
 public:
  // True if VNPU_TRACE is set.
  static bool is_wanted();
  // Null when VNPU_TRACE was not set at the first call.
  static Recorder* instance();

  explicit Recorder(Timeline& timeline) : timeline_(timeline) {}

  Needs needs() const override { return {.accesses = true}; }  // for the bytes
  void on_launch(const Stream& stream, const Task& task, const std::string& call_site) override;
  void on_advance(const Stream& stream, const Task& task) override;
  void on_blocked(const Stream& stream, const Task& task) override;
  void on_end(const Stream& stream, const Task& task, bool failed) override;

  void name_stream(const Stream& stream, const std::string& name);
  // Label of the program's launches from now on; "" for none.
  void label_launches(std::string label);

 private:
  using Time = int64_t;  // ns
  struct Course {
    Time launched = 0;
    Time begun = 0;
    Time blocked = 0;  // since when, 0: not
    Time waited = 0;
    std::string label;
  };

  Timeline& timeline_;
  std::mutex mutex_;
  std::unordered_map<const Task*, Course> courses_;
  std::unordered_map<int, std::string> names_;  // of streams
  std::string label_;
};

}  // namespace vnpu::trace
