#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace vnpu::timing {

// Address ranges that are in a device's L2. The least recently used range is evicted first. A range
// is used from begin to end, so that the end of a range larger than the cache stays. Assumed: no
// source states the policy, or the order in which cores traverse an operand.
class Cache {
 public:
  explicit Cache(int64_t capacity) : capacity_(capacity) {}

  struct Found {
    int64_t bytes = 0;
    int64_t touched = 0;  // the bytes of these prefetches that `touch` has not used
    // Prefetches that bring some of the bytes, as passed to `bring`. Each once.
    std::vector<uint64_t> arrivals;
    void await(uint64_t arrival);
  };

  // Uses [begin, end): returns which of its bytes were present.
  Found use(uintptr_t begin, uintptr_t end);
  // Uses `bytes` bytes anywhere in a range that starts at `begin`; they count as its first bytes.
  void touch(uintptr_t begin, uintptr_t bytes) { use(begin, begin + bytes, 0, true); }
  // The bytes of [begin, end) that are present. Does not count as a use.
  Found find(uintptr_t begin, uintptr_t end) const;
  // Uses [begin, end), which arrives at `arrival` (not 0); the first task that finds some of it
  // waits for that. Returns the bytes that were present.
  int64_t bring(uintptr_t begin, uintptr_t end, uint64_t arrival);
  // Another device has written [begin, end).
  void forget(uintptr_t begin, uintptr_t end);

 private:
  struct Range {
    uintptr_t end;
    uint64_t used;     // when: counts uses
    uint64_t arrival;  // 0: it is there
    bool is_touched;
  };
  using Ranges = std::map<uintptr_t, Range>;

  Found use(uintptr_t begin, uintptr_t end, uint64_t arrival, bool is_touched);
  // The first range that ends after an address.
  Ranges::const_iterator after(uintptr_t address) const;
  // Cuts a range in two where the address lies within one.
  void cut(uintptr_t address);
  void put(uintptr_t begin, Range range);
  // Puts it, merged with the range that ends where it begins if both are alike.
  void append(uintptr_t begin, Range range);
  void drop(Ranges::const_iterator range);
  // Evicts the least recently used ranges until all fits; [next, end) is used next.
  void make_room(uintptr_t next, uintptr_t end);

  const int64_t capacity_;
  int64_t bytes_ = 0;
  uint64_t uses_ = 0;
  Ranges ranges_;                            // by begin; none overlap
  std::multimap<uint64_t, uintptr_t> ages_;  // used -> begin
};

}  // namespace vnpu::timing
