#include "device/event.h"

#include <chrono>

namespace vnpu {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

uint64_t Event::next_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void Event::complete(uint64_t version, const std::optional<Failure>& failure) {
  std::lock_guard lock(mutex_);
  // Two streams may record one event: completion never goes back.
  if (version <= completed.load(std::memory_order_relaxed)) return;
  time_ns.store(now_ns(), std::memory_order_relaxed);
  failure_ = failure;
  completed.store(version, std::memory_order_release);
}

void Event::throw_if_failed(uint64_t version) const {
  std::lock_guard lock(mutex_);
  if (failure_.has_value() && completed.load(std::memory_order_relaxed) >= version) throw *failure_;
}

EventRecord::EventRecord(EventPtr event, uint64_t version)
    : Task("event record"), event_(std::move(event)), version_(version) {}

Progress EventRecord::advance() {
  event_->complete(version_, failure_);
  return Progress::kDone;
}

EventWait::EventWait(EventPtr event, uint64_t version)
    : Task("event wait"), event_(std::move(event)), version_(version) {}

Progress EventWait::advance() {
  if (event_->completed.load(std::memory_order_acquire) < version_) return Progress::kBlocked;
  event_->throw_if_failed(version_);
  return Progress::kDone;
}

std::string EventWait::waiting_for() const {
  return "record " + std::to_string(version_) + " of event " + std::to_string(event_->id);
}

}  // namespace vnpu
