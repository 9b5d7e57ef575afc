#include "device/event.h"

#include <algorithm>
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

uint64_t Event::add_record() {
  return shared != nullptr ? shared->add() : recorded.fetch_add(1) + 1;
}

uint64_t Event::newest() const {
  return shared != nullptr ? shared->newest() : recorded.load(std::memory_order_acquire);
}

bool Event::is_abandoned(uint64_t version) const {
  return shared != nullptr && shared->is_abandoned(version);
}

bool Event::reached(uint64_t version) const {
  if (shared != nullptr) return shared->reached(version);
  if (version <= all_reached_.load(std::memory_order_acquire)) return true;
  std::lock_guard lock(mutex_);
  return version <= all_reached_.load(std::memory_order_relaxed) || ahead_.count(version) != 0;
}

void Event::complete(uint64_t version, const std::optional<Failure>& failure) {
  std::lock_guard lock(mutex_);
  if (version > newest_) {
    newest_ = version;
    time_ns.store(now_ns(), std::memory_order_relaxed);
  }
  if (failure.has_value()) {
    failed_ = version;
    failure_ = failure;
  }
  if (shared != nullptr) {
    shared->reach(version, failure.has_value());
    return;
  }
  uint64_t all = all_reached_.load(std::memory_order_relaxed);
  if (version > all + 1) {
    ahead_.insert(version);
    return;
  }
  for (all = std::max(all, version); ahead_.erase(all + 1) != 0;) ++all;
  all_reached_.store(all, std::memory_order_release);
}

void Event::throw_if_failed(uint64_t version) const {
  std::lock_guard lock(mutex_);
  if (failure_.has_value() && failed_ == version) throw *failure_;
  if (shared != nullptr) shared->throw_if_failed(version);
}

EventRecord::EventRecord(EventPtr event, uint64_t version, EventHoldPtr hold)
    : Task("event record"), event_(std::move(event)), version_(version), hold_(std::move(hold)) {}

Progress EventRecord::advance() {
  event_->complete(version_, failure_);
  hold_.reset();
  return Progress::kDone;
}

EventWait::EventWait(EventPtr event, uint64_t version)
    : Task("event wait"), event_(std::move(event)), version_(version) {}

Progress EventWait::advance() {
  if (!event_->reached(version_) && !event_->is_abandoned(version_)) return Progress::kBlocked;
  event_->throw_if_failed(version_);
  return Progress::kDone;
}

std::string EventWait::waiting_for() const {
  return "record " + std::to_string(version_) + " of event " + std::to_string(event_->id);
}

}  // namespace vnpu
