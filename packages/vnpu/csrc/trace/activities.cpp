#include "trace/activities.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "collective/collective.h"
#include "device/stream.h"
#include "trace/recorder.h"

namespace vnpu::trace {
namespace {

constexpr size_t kMuch = 1 << 15;  // activities, 3 MB

int this_thread() {
  static thread_local const int id = static_cast<int>(::syscall(SYS_gettid));
  return id;
}

// The task that the calling thread advances: whose nodes it runs.
struct Running {
  const Task* task = nullptr;
  int device = 0;
  int stream = 0;
};
thread_local Running running;
thread_local std::map<int, std::vector<uint64_t>> regions;

Activity::Kind kind_of(const Task& task) {
  switch (category_of(task)) {
    case Category::kOperator: return Activity::Kind::kOperator;
    case Category::kCollective: return Activity::Kind::kCollective;
    case Category::kCopy: return Activity::Kind::kCopy;
    case Category::kRecord: return Activity::Kind::kRecord;
    case Category::kWait: return Activity::Kind::kWait;
    case Category::kOther: break;
  }
  return Activity::Kind::kOther;
}

}  // namespace

Activities& Activities::make(Clock clock) {
  auto* const made = new Activities(clock);  // until the process ends
  Observers::instance().add(*made);
  return *made;
}

void Activities::collect(Activity::Kind kind, bool is_wanted) {
  wanted_[index(kind)] = is_wanted;
  if (collects_any()) return;
  const std::lock_guard lock(mutex_);
  courses_.clear();
}

bool Activities::collects_any() const {
  for (const std::atomic<bool>& each : wanted_) {
    if (each.load(std::memory_order_relaxed)) return true;
  }
  return false;
}

std::vector<Activity> Activities::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

void Activities::enter_region(int kind, uint64_t region) { regions[kind].push_back(region); }

std::optional<uint64_t> Activities::leave_region(int kind) {
  std::vector<uint64_t>& of_kind = regions[kind];
  if (of_kind.empty()) return std::nullopt;
  const uint64_t region = of_kind.back();
  of_kind.pop_back();
  return region;
}

void Activities::on_launch(const Stream& stream, const Task& task, const std::string&) {
  if (!collects_any() || stream.capture != nullptr) return;
  const std::lock_guard lock(mutex_);
  const uint64_t launch = ++launches_;
  courses_[&task] = {.launch = launch, .launched = now_(), .thread = this_thread()};
  if (!collects(Activity::Kind::kLaunch)) return;
  for (const auto& [kind, of_kind] : regions) {
    if (of_kind.empty()) continue;
    ended_.push_back({.kind = Activity::Kind::kLaunch,
                      .launch = launch,
                      .region_kind = kind,
                      .region = of_kind.back()});
  }
}

void Activities::on_advance(const Stream& stream, const Task& task) {
  if (!collects_any()) return;
  const int64_t now = now_();
  running = {.task = &task, .device = stream.device, .stream = stream.id};
  const std::lock_guard lock(mutex_);
  const auto found = courses_.find(&task);
  if (found != courses_.end() && found->second.begin == 0) found->second.begin = now;
}

void Activities::on_end(const Stream& stream, const Task& task, bool failed) {
  if (!collects_any()) return;
  const std::optional<Course> course = finished(task);
  if (course.has_value() && !failed) add(task, *course, stream.device, stream.id);
}

void Activities::on_node_advance(const Task& node) {
  if (!collects_any()) return;
  const int64_t now = now_();
  const std::lock_guard lock(mutex_);
  const auto replay = courses_.find(running.task);
  if (replay == courses_.end()) return;
  Course course = replay->second;
  course.begin = now;
  courses_.try_emplace(&node, course);
}

void Activities::on_node_end(const Task& node) {
  if (!collects_any()) return;
  const std::optional<Course> course = finished(node);
  if (course.has_value()) add(node, *course, running.device, running.stream);
}

std::optional<Activities::Course> Activities::finished(const Task& task) {
  const std::lock_guard lock(mutex_);
  const auto found = courses_.find(&task);
  if (found == courses_.end()) return std::nullopt;
  const Course course = found->second;
  courses_.erase(found);
  return course;
}

void Activities::add(const Task& task, const Course& course, int device, int stream) {
  const Activity::Kind kind = kind_of(task);
  if (!collects(kind)) return;
  Activity activity{.kind = kind,
                    .launch = course.launch,
                    .name = task.name,
                    .device = device,
                    .stream = stream,
                    .launched = course.launched,
                    .thread = course.thread,
                    .begin = course.begin,
                    .end = now_()};
  bool is_much = false;
  {
    const std::lock_guard lock(mutex_);
    if (const auto* collective = dynamic_cast<const Collective*>(&task)) {
      const Announcement& announced = collective->announcement();
      activity.group = kept_name(collective->member()->name());
      if (announced.type != Announcement::kNone) {
        activity.type = static_cast<ElementType>(announced.type);
      }
      activity.count = announced.count;
    }
    ended_.push_back(activity);
    is_much = ended_.size() >= kMuch;
  }
  if (void (*const deliver)() = deliver_; is_much && deliver != nullptr) deliver();
}

const char* Activities::kept_name(const std::string& name) {
  return names_.insert(name).first->c_str();
}

}  // namespace vnpu::trace
