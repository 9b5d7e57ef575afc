#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace vnpu {

// Pinned host memory of this process, by first byte.
class PinnedMemory {
 public:
  static PinnedMemory& instance();

  void add(const void* begin, size_t bytes, bool owned);
  // The bytes of the range that begins there. Throws unless there is one, `owned` alike; `function`
  // is who asks.
  size_t bytes(const void* begin, bool owned, const char* function) const;
  void remove(const void* begin);
  bool contains(const void* address) const;

 private:
  struct Range {
    size_t bytes;
    bool owned;  // allocated by the runtime, not registered by the program
  };
  mutable std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;
};

}  // namespace vnpu
