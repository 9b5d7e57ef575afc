#pragma once

// The plan in VNPU_FAULTS: which calls fail, where and how.
//
//   plan   := entry { (";" | newline) entry }
//   entry  := "rank=" NUMBER | "count:" DIRECTORY | rule
//   rule   := kind [":" name] "@" NUMBER ["+"] ["." phase] "=" action
//   action := "oom" | CODE | "throw" | "die" | "stop" | "hang" | "delay:" NUMBER ("ms" | "s")
//           | "gone" | "truncated" | "async:" action | ERRNO | "jump:" ["-"] NUMBER ("ms" | "s")
//
// An entry rank=N applies to the rules after it, up to the next one. A rule applies to the NUMBERth
// point that it names, counted from 1 in each process; with "+" to that one and all after it.

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vnpu::faults {

// Kinds of points that can fail. kPoint matches all of them except the host's.
enum class Kind : uint8_t {
  kPoint,
  kAlloc,        // device memory
  kPhysical,     // memory without an address
  kMap,          // ... that gets one
  kPinned,       // host memory of the runtime
  kStream,       // made
  kEvent,        // made or recorded
  kLaunch,       // of any task on a stream: its name is the operator's
  kSynchronize,  // a wait of the host for a stream, an event or a device
  kCollective,   // its name is the collective's, or that of a send or receive
  kSegment,      // shared memory of a group: "create", "open", "map"
  // Calls of the C library, which csrc/host_faults reaches: "malloc", "open", "write", "fsync"
  kHost,
  kClock,  // a reading of the host's clock, likewise: "monotonic", "realtime"
};
constexpr size_t kKinds = 13;
const char* name_of(Kind kind);

// Phase of a collective. A send has put, a receive has get.
enum class Phase : uint8_t { kAny, kJoin, kPut, kMeet, kGet, kEnd };
const char* name_of(Phase phase);

struct Action {
  enum class What : uint8_t {
    kCode,
    kOom,
    kThrow,
    kDie,
    kStop,
    kHang,
    kDelay,
    kGone,
    kTruncated,
    kJump,   // the clock jumps ahead by `delay`
    kErrno,  // the call fails with `code` of errno.h
  };
  What what = What::kThrow;
  bool is_async = false;  // when the task runs, not when it is launched
  int code = 0;           // of CANN, or of errno.h
  std::chrono::milliseconds delay{0};
};

struct Rule {
  std::optional<int> rank;
  Kind kind = Kind::kPoint;
  std::string name;  // empty: any
  uint64_t first = 1;
  bool is_sticky = false;
  Phase phase = Phase::kAny;
  Action action;
  std::string text;  // as the plan says it
};

struct Plan {
  std::string count_directory;  // empty: nothing is counted
  std::vector<Rule> rules;

  // Throws Failure with line, column and what was expected. A `text` that begins with @ names a
  // file with the plan.
  static Plan parse(const std::string& text);

  // True if a rule is for the host's own calls.
  bool is_of_host() const;
};

}  // namespace vnpu::faults
