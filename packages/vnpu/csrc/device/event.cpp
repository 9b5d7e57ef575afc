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

EventRecord::EventRecord(EventPtr event, uint64_t version)
    : Task("event record"), event_(std::move(event)), version_(version) {}

Progress EventRecord::advance() {
  event_->time_ns.store(now_ns(), std::memory_order_relaxed);
  // Two streams may record one event: completion never goes back.
  uint64_t seen = event_->completed.load(std::memory_order_relaxed);
  while (seen < version_ && !event_->completed.compare_exchange_weak(seen, version_)) {
  }
  return Progress::kDone;
}

EventWait::EventWait(EventPtr event, uint64_t version)
    : Task("event wait"), event_(std::move(event)), version_(version) {}

Progress EventWait::advance() {
  return event_->completed.load(std::memory_order_acquire) >= version_ ? Progress::kDone
                                                                       : Progress::kBlocked;
}

std::string EventWait::waiting_for() const {
  return "record " + std::to_string(version_) + " of event " + std::to_string(event_->id);
}

}  // namespace vnpu
