#pragma once

#include <cstdint>
#include <map>

namespace vnpu::timing {

// Which memory is in a device's L2: whole ranges of addresses, the one used longest ago leaves
// first. What is larger than the cache goes through it and leaves nothing there.
class Cache {
 public:
  explicit Cache(int64_t capacity) : capacity_(capacity) {}

  // Uses [begin, end); the bytes of it that were there.
  int64_t use(uintptr_t begin, uintptr_t end);
  // Others have written [begin, end).
  void forget(uintptr_t begin, uintptr_t end) { take(begin, end); }

 private:
  struct Range {
    uintptr_t end;
    uint64_t used;  // when: counts uses
  };

  int64_t take(uintptr_t begin, uintptr_t end);
  void put(uintptr_t begin, Range range);
  void drop(std::map<uintptr_t, Range>::iterator range);

  const int64_t capacity_;
  int64_t bytes_ = 0;
  uint64_t uses_ = 0;
  std::map<uintptr_t, Range> ranges_;        // by begin; none overlap
  std::multimap<uint64_t, uintptr_t> ages_;  // used -> begin
};

}  // namespace vnpu::timing
