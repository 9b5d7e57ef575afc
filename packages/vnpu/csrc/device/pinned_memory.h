#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace vnpu {

// Pinned host memory of this process, by first byte. Memory that the runtime has allocated can be
// registered too, as torch_npu does if the device reads it in place.
class PinnedMemory {
 public:
  static PinnedMemory& instance();

  // owned: allocated by the runtime, not registered by the program. is_mapped: registered so that
  // the device reads and writes it in place.
  void add(const void* begin, size_t bytes, bool owned, bool is_mapped = false);
  // Bytes of the range that begins there. Throws if there is none with the same `owned`;
  // `function`: the caller, for the message.
  size_t bytes(const void* begin, bool owned, const char* function) const;
  void remove(const void* begin, bool owned);
  // True if all of it lies in one range.
  bool contains(const void* address, size_t bytes = 1) const;
  // True if the device reaches all of a range.
  bool is_mapped(const void* address, size_t bytes) const;

 private:
  struct Range {  // bytes, 0: none
    size_t allocated = 0;
    size_t registered = 0;
    bool is_mapped = false;
    size_t& of(bool owned) { return owned ? allocated : registered; }
    size_t of(bool owned) const { return owned ? allocated : registered; }
  };
  // length: bytes of a range from its begin on
  bool lies_in_one(const void* address, size_t bytes, size_t (*length)(const Range&)) const;
  mutable std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;
};

}  // namespace vnpu
