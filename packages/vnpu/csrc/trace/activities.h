#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "collective/element.h"
#include "device/observer.h"

namespace vnpu::trace {

// An activity of a device, or its launch inside a region that the program has named. Times are
// nanoseconds by the collector's clock.
struct Activity {
  enum class Kind { kOperator, kCollective, kCopy, kRecord, kWait, kOther, kLaunch };
  static constexpr size_t kKinds = 7;
  Kind kind;
  uint64_t launch;  // number of the launch; a replay's activities share it
  // --- all kinds except kLaunch
  const char* name = "";  // a literal
  int device = 0;
  int stream = 0;
  int64_t launched = 0;
  int thread = 0;  // system's id of the launching thread
  int64_t begin = 0;
  int64_t end = 0;
  // --- collectives
  const char* group = "";  // lives as long as the process
  std::optional<ElementType> type = std::nullopt;
  uint64_t count = 0;  // elements
  // --- launches
  int region_kind = 0;
  uint64_t region = 0;
};

// Collects activities of this process's devices, those inside replays too, while a client requests
// them. There is one collector per client, each with its own kinds. Before its construction nothing
// is collected, at no cost.
class Activities final : public Observer {
 public:
  using Clock = int64_t (*)();  // ns

  // Never destroyed; its client keeps it.
  static Activities& make(Clock clock);

  // Begins or ends the collection of a kind. What is launched before is not seen.
  void collect(Activity::Kind kind, bool is_wanted);
  bool collects(Activity::Kind kind) const { return wanted_[index(kind)]; }
  // All activities that ended since the last call, in the order of their ends.
  std::vector<Activity> take();
  // `deliver` is called when many activities are waiting, on the thread that added the last one.
  void on_full(void (*deliver)()) { deliver_ = deliver; }

  // Regions of the calling thread, a stack for each kind: launches belong to the innermost ones.
  static void enter_region(int kind, uint64_t region);
  static std::optional<uint64_t> leave_region(int kind);

  Needs needs() const override { return {}; }
  void on_launch(const Stream& stream, const Task& task, const std::string& call_site) override;
  void on_advance(const Stream& stream, const Task& task) override;
  void on_end(const Stream& stream, const Task& task, bool failed) override;
  void on_node_advance(const Task& node) override;
  void on_node_end(const Task& node) override;

 private:
  struct Course {
    uint64_t launch = 0;
    int64_t launched = 0;
    int thread = 0;
    int64_t begin = 0;
  };

  explicit Activities(Clock clock) : now_(clock) {}
  static size_t index(Activity::Kind kind) { return static_cast<size_t>(kind); }
  bool collects_any() const;
  // The record of a task that ends; none if no client asked for it when it began.
  std::optional<Course> finished(const Task& task);
  void add(const Task& task, const Course& course, int device, int stream);
  const char* kept_name(const std::string& name);

  const Clock now_;
  std::array<std::atomic<bool>, Activity::kKinds> wanted_ = {};
  std::atomic<void (*)()> deliver_{nullptr};
  std::mutex mutex_;
  uint64_t launches_ = 0;
  std::unordered_map<const Task*, Course> courses_;
  std::vector<Activity> ended_;
  std::set<std::string> names_;  // of groups
};

}  // namespace vnpu::trace
