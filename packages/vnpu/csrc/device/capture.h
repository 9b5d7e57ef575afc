#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "device/failure.h"

namespace vnpu {

// Violations of a capture's rules.
enum class CaptureRule {
  kDefaultStream,     // the default stream takes no part in a capture
  kCapturing,         // the stream captures already
  kNotCapturing,      // the stream captures nothing
  kOtherOrigin,       // a capture ends on the stream on which it began
  kOtherThread,       // ... and on its thread
  kOtherGraph,        // an event, or a stream, of another capture
  kUnjoined,          // work of a side stream that the first stream does not wait for
  kHostWait,          // the host waits for a captured task, or queries it
  kSynchronousCopy,   // a copy, or fill, for which the host waits
  kGroup,             // a task group that is not open, or open already
  kGroupInterrupted,  // another stream of the capture launches into an open group
  kUpdate,            // an update that does not repeat number and kind of a group's tasks
  kRunning,           // a graph is destroyed, and one of its replays is not over
};

// Breach of a rule of captures.
class CaptureFailure : public Failure {
 public:
  CaptureFailure(CaptureRule rule, const std::string& message)
      : Failure(FailureKind::kCaptureConflict, message), rule(rule) {}
  CaptureRule rule;
};

// Extent to which other threads' calls disturb a capture.
enum class CaptureMode {
  kGlobal,       // no thread copies synchronously, unless it has exchanged its mode
  kThreadLocal,  // the capturing thread does not
  kRelaxed,      // all may
};

// Partial order of captured launches, from stream order and events.
class CaptureOrder {
 public:
  void launched(int stream) { ++clocks_[stream][stream]; }
  void recorded(int stream, uint64_t event) {
    events_[event] = clocks_[stream];
    ++num_records_;
  }
  void waited(int stream, uint64_t event) {
    for (const auto& [other, count] : events_[event]) {
      uint64_t& seen = clocks_[stream][other];
      if (count > seen) seen = count;
    }
  }
  int num_streams() const { return static_cast<int>(clocks_.size()); }
  int num_records() const { return num_records_; }
  // A stream with launches that no launch on `origin` follows; -1 if there is none.
  int unjoined(int origin) {
    const std::map<int, uint64_t>& seen = clocks_[origin];
    for (const auto& [stream, clock] : clocks_) {
      const auto own = clock.find(stream);
      if (own == clock.end()) continue;
      const auto joined = seen.find(stream);
      if (joined == seen.end() || joined->second < own->second) return stream;
    }
    return -1;
  }

 private:
  std::map<int, std::map<int, uint64_t>> clocks_;       // by stream: launches seen, by stream
  std::map<uint64_t, std::map<int, uint64_t>> events_;  // by event: those at its newest record
  int num_records_ = 0;
};

// Location and mode of a capture's begin.
struct CaptureOrigin {
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread = std::this_thread::get_id();
  std::string call_site;  // lines of Python; empty without any
};

}  // namespace vnpu
