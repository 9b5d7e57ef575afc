#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace vnpu {

// A process of this host, told apart from a later one with the same number by its start time.
struct ProcessIdentity {
  pid_t pid;
  uint64_t start_time;  // clock ticks since boot

  static ProcessIdentity self();
  // False once it has ended, also while its parent has not collected it yet.
  bool alive() const;
};

// Name of this host, and of its process number space: pids mean the same where both agree.
std::string host_name();
uint64_t pid_namespace();

}  // namespace vnpu
