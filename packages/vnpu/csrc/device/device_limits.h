#pragma once

#include <map>
#include <memory>
#include <mutex>

namespace vnpu {

// Counts of limited device resources. Streams: those of programs, and those that captured graphs
// hold after their first execution. Events: see Event::Holds, and those between a graph's streams.
// Counted per process; a chip counts all processes'.
class DeviceLimits {
 public:
  enum class Kind { kStreams, kEvents };
  static DeviceLimits& instance();

  // Throws kTooManyStreams or kTooManyEvents where fewer than `count` are left.
  void take(Kind kind, int device, int count);
  void give(Kind kind, int device, int count);
  bool has_room(Kind kind, int device);

 private:
  struct Taken {
    int streams = 0;
    int events = 0;
    int& of(Kind kind) { return kind == Kind::kStreams ? streams : events; }
  };
  std::mutex mutex_;
  std::map<int, Taken> taken_;  // by device
};

// One of a device's events, given back at the end. Making it throws kTooManyEvents.
class EventHold {
 public:
  explicit EventHold(int device) : device_(device) {
    DeviceLimits::instance().take(DeviceLimits::Kind::kEvents, device, 1);
  }
  ~EventHold() { DeviceLimits::instance().give(DeviceLimits::Kind::kEvents, device_, 1); }
  EventHold(const EventHold&) = delete;
  EventHold& operator=(const EventHold&) = delete;

 private:
  int device_;
};

using EventHoldPtr = std::shared_ptr<EventHold>;

}  // namespace vnpu
