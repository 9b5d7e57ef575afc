#pragma once

#include <map>
#include <mutex>

namespace vnpu {

// The streams that a device has: those that programs make, and those that captured graphs hold from
// their first execution on. Of this process; a chip counts all processes'.
class StreamLimit {
 public:
  static StreamLimit& instance();

  // Throws kTooManyStreams where fewer than `count` are left.
  void take(int device, int count);
  void give(int device, int count);

 private:
  std::mutex mutex_;
  std::map<int, int> taken_;  // by device
};

}  // namespace vnpu
