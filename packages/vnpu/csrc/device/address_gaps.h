#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace vnpu {

// The free parts of an address range. Adjacent free parts are merged.
class AddressGaps {
 public:
  // Takes `bytes` out of a gap; returns null if no gap is large enough. Next fit, from `start` on:
  // freed addresses are reused as late as possible, so that a stale address stays stale. alignment:
  // of the address, in bytes
  void* carve(uintptr_t start, size_t bytes, size_t alignment);
  void give_back(uintptr_t begin, size_t bytes);

 private:
  std::map<uintptr_t, size_t> gaps_;  // begin -> bytes
};

}  // namespace vnpu
