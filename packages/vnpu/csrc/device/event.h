#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "device/failure.h"
#include "device/task.h"

namespace vnpu {

class Graph;

// An event. record() marks a point of a stream; a wait refers to the newest record at the time of
// the call. A never-recorded event is complete. Shared: recorded work may outlive its handle.
class Event {
 public:
  explicit Event(uint32_t flags) : id(next_id()), flags(flags) {}

  bool complete() const {
    return completed.load(std::memory_order_acquire) >= recorded.load(std::memory_order_acquire);
  }

  // The stream has reached a record, or has failed before it: what waits for the event then has
  // nothing to work on and fails likewise.
  void complete(uint64_t version, const std::optional<Failure>& failure);
  // Throws what kept the stream from reaching the record, if anything did.
  void throw_if_failed(uint64_t version) const;

  const uint64_t id;
  const uint32_t flags;
  std::atomic<uint64_t> recorded{0};   // records asked for
  std::atomic<uint64_t> completed{0};  // records reached by their stream
  std::atomic<int64_t> time_ns{0};     // of the newest completed record
  // The graph under capture in which the newest record was made, if it was made in one.
  std::weak_ptr<Graph> captured_in;

 private:
  static uint64_t next_id();
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;  // of the newest completed record
};

using EventPtr = std::shared_ptr<Event>;

class EventRecord final : public Task {
 public:
  EventRecord(EventPtr event, uint64_t version);
  Progress advance() override;
  // The stream has failed before this record.
  void fail(const Failure& failure) { failure_ = failure; }
  const Event& event() const { return *event_; }
  uint64_t version() const { return version_; }

 private:
  EventPtr event_;
  uint64_t version_;
  std::optional<Failure> failure_;
};

class EventWait final : public Task {
 public:
  EventWait(EventPtr event, uint64_t version);
  Progress advance() override;
  std::string waiting_for() const override;
  const Event& event() const { return *event_; }
  uint64_t version() const { return version_; }

 private:
  EventPtr event_;
  uint64_t version_;
};

}  // namespace vnpu
