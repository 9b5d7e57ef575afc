#include "trace/recorder.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "collective/collective.h"
#include "collective/transfers.h"
#include "device/event.h"
#include "device/failure.h"
#include "device/stream.h"
#include "device/traffic.h"

namespace vnpu::trace {
namespace {

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string clock_name() {
  std::string text = "the host's wall clock";
  const char* pace = std::getenv("VNPU_PACE");
  if (pace != nullptr && *pace != '\0') {
    text += std::string(" with artificial durations: VNPU_PACE=") + pace;
  }
  return text;
}

Recorder* start(const char* directory) {
  if (::access(directory, W_OK | X_OK) != 0) {
    throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: VNPU_TRACE='") + directory +
                                                     "' is not valid: " + std::strerror(errno) +
                                                     ". Expected a directory that can be written.");
  }
  static Timeline* const timeline = new Timeline(
      std::string(directory) + "/" + std::to_string(::getpid()) + ".trace.json", clock_name());
  std::atexit([] { timeline->close(); });
  return new Recorder(*timeline);  // until the process ends
}

// Null when no trace is wanted.
const char* directory() {
  const char* name = std::getenv("VNPU_TRACE");
  return name == nullptr || *name == '\0' ? nullptr : name;
}

}  // namespace

Category category_of(const Task& task) {
  if (dynamic_cast<const Collective*>(&task) != nullptr) return Category::kCollective;
  if (dynamic_cast<const Transfers*>(&task) != nullptr) return Category::kCollective;
  if (dynamic_cast<const EventRecord*>(&task) != nullptr) return Category::kRecord;
  if (dynamic_cast<const EventWait*>(&task) != nullptr) return Category::kWait;
  const std::string_view name = task.name;
  if (name.starts_with("aclnn")) return Category::kOperator;
  if (name.starts_with("memory")) return Category::kCopy;
  return Category::kOther;
}

bool Recorder::is_wanted() { return directory() != nullptr; }

Recorder* Recorder::instance() {
  static Recorder* const recorder = is_wanted() ? start(directory()) : nullptr;
  return recorder;
}

void Recorder::on_launch(const Stream& stream, const Task& task, const std::string&) {
  if (stream.capture != nullptr) return;  // kept, not run
  std::lock_guard lock(mutex_);
  Course& course = courses_[&task] = Course();
  course.launched = steady_now_ns();
  course.label = label_;
}

void Recorder::on_advance(const Stream&, const Task& task) {
  const Time now = steady_now_ns();
  std::lock_guard lock(mutex_);
  Course& course = courses_[&task];
  if (course.begun == 0) course.begun = now;
  if (course.blocked != 0) course.waited += now - course.blocked;
  course.blocked = 0;
}

void Recorder::on_blocked(const Stream&, const Task& task) {
  const Time now = steady_now_ns();
  std::lock_guard lock(mutex_);
  courses_[&task].blocked = now;
}

void Recorder::on_end(const Stream& stream, const Task& task, bool failed) {
  Span span;
  span.task = task.name;
  span.category = category_of(task);
  span.stream = stream.id;
  span.end = steady_now_ns();
  const Traffic traffic = traffic_of(task);
  span.read_bytes = traffic.read;
  span.written_bytes = traffic.written;
  if (const auto* record = dynamic_cast<const EventRecord*>(&task)) {
    span.event = record->event().id;
    span.version = record->version();
  } else if (const auto* wait = dynamic_cast<const EventWait*>(&task)) {
    span.event = wait->event().id;
    span.version = wait->version();
  }
  span.failed = failed;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = courses_.find(&task); found != courses_.end()) {
      Course& course = found->second;
      span.launched = course.launched;
      span.begin = course.begun;
      span.waited = course.waited;
      span.label = std::move(course.label);
      courses_.erase(found);
    }
    if (names_.find(stream.id) == names_.end()) {
      const char* name = span.category == Category::kCollective ? "collectives" : nullptr;
      if (name != nullptr) {
        names_[stream.id] = name;
        timeline_.name_stream(stream.device, stream.id, name);
      }
    }
  }
  timeline_.add(std::move(span));
}

void Recorder::name_stream(const Stream& stream, const std::string& name) {
  std::lock_guard lock(mutex_);
  names_[stream.id] = name;
  timeline_.name_stream(stream.device, stream.id, name);
}

void Recorder::label_launches(std::string label) {
  std::lock_guard lock(mutex_);
  label_ = std::move(label);
}

}  // namespace vnpu::trace
