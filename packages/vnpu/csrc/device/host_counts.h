#pragma once

#include <atomic>
#include <cstdint>

namespace vnpu {

// Counts of the host's launches, and of its waits for devices, since the process began.
//
// Where VNPU_COUNTS names a directory, the counters lie in its file `PROCESS.counts`: these three
// numbers of eight bytes each, and the process's command line after them. Nothing is left to write
// when a process ends, or is killed.
struct HostCounts {
  std::atomic<uint64_t> launches{0};          // one for a replay; no records and waits of events
  std::atomic<uint64_t> synchronizations{0};  // of streams, events and devices, also idle ones
  std::atomic<uint64_t> copies_to_host{0};    // from a device, asynchronous ones too

  // Throws Failure where VNPU_COUNTS names no directory that can be written.
  static HostCounts& instance();
};

}  // namespace vnpu
