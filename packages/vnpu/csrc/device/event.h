#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "device/device_limits.h"
#include "device/failure.h"
#include "device/shared_records.h"
#include "device/task.h"

namespace vnpu {

class Graph;

// An event. record() marks a point of a stream; a wait refers to the newest record at the time of
// the call. A later record does not count, even if it is on another stream and is reached earlier.
// A never-recorded event is complete. Shared: recorded work may outlive its handle.
class Event {
 public:
  // Number of device events that it holds: none; one permanently, from its first record or earlier;
  // or one for each record until that is reached.
  enum class Holds { kNone, kForGood, kWhileRecorded };

  explicit Event(uint32_t flags, Holds holds = Holds::kWhileRecorded,
                 SharedRecordsPtr shared = nullptr)
      : id(next_id()), flags(flags), holds(holds), shared(std::move(shared)) {}

  // Counts a requested record; returns its version.
  uint64_t add_record();
  // Number of records launched so far, by other processes too.
  uint64_t newest() const;

  // True if a stream has reached the record of this version; the first is 1.
  bool reached(uint64_t version) const;
  // True if the newest record has been reached.
  bool complete() const { return reached(newest()); }
  // True if the record will never be reached, because the process that launched it has ended.
  bool is_abandoned(uint64_t version) const;

  // Called when the stream has reached a record, or has failed before it: tasks that wait for the
  // event then fail too, because their inputs do not exist.
  void complete(uint64_t version, const std::optional<Failure>& failure);
  // Throws the failure that kept the stream from reaching the record, if any.
  void throw_if_failed(uint64_t version) const;

  const uint64_t id;
  const uint32_t flags;
  const Holds holds;
  const SharedRecordsPtr shared;      // of an event that several processes use
  EventHoldPtr hold;                  // taken for good
  std::atomic<uint64_t> recorded{0};  // records asked for, where it is not shared
  std::atomic<int64_t> time_ns{0};    // of the newest reached record
  // The graph under capture in which the newest record was made, if it was made in one.
  std::weak_ptr<Graph> captured_in;

 private:
  static uint64_t next_id();
  mutable std::mutex mutex_;
  std::atomic<uint64_t> all_reached_{0};  // all records up to this one are reached
  std::set<uint64_t> ahead_;              // reached records after all_reached_
  uint64_t newest_ = 0;                   // newest reached record
  uint64_t failed_ = 0;                   // record that was not reached because of failure_
  std::optional<Failure> failure_;
};

using EventPtr = std::shared_ptr<Event>;

class EventRecord final : public Task {
 public:
  EventRecord(EventPtr event, uint64_t version, EventHoldPtr hold = nullptr);
  Progress advance() override;
  // The stream has failed before this record.
  void fail(const Failure& failure) { failure_ = failure; }
  const Event& event() const { return *event_; }
  uint64_t version() const { return version_; }

 private:
  EventPtr event_;
  uint64_t version_;
  EventHoldPtr hold_;
  std::optional<Failure> failure_;
};

class EventWait final : public Task {
 public:
  EventWait(EventPtr event, uint64_t version);
  Progress advance() override;
  bool waits_outside() const override { return event_->shared != nullptr; }
  std::string waiting_for() const override;
  const Event& event() const { return *event_; }
  uint64_t version() const { return version_; }

 private:
  EventPtr event_;
  uint64_t version_;
};

}  // namespace vnpu
