#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vnpu {

// Device memory that a task reads or writes: in [begin, end), the elements of a strided tensor's
// `layout` (dims == 0: every byte).
struct Access {
  struct Layout {
    int dims = 0;
    int64_t item = 0;  // bytes of one element
    int64_t sizes[8] = {};
    int64_t strides[8] = {};  // bytes
    int64_t first = 0;        // bytes from begin to element 0
  };
  uintptr_t begin;
  uintptr_t end;
  bool write;
  Layout layout = {};
  // For a kernel that reports accesses: the line, which lives as long as the process, and the
  // program (x, y, z) of its grid.
  const char* line = nullptr;
  uint32_t program[3] = {};
};

struct MemoryRange {
  uintptr_t begin;
  uintptr_t end;
};

// The memory that a task reads and writes. Writes are always known; the rest is recorded only if an
// observer needs it, because that costs time at each launch.
class Touched {
 public:
  static bool keeps_accesses;

  void add(const Access& access) {
    if (access.write) add_written({access.begin, access.end});
    if (keeps_accesses) accesses_.push_back(access);
  }
  void add_written(const MemoryRange& range) {
    if (written_ < kNear) {
      near_[written_] = range;
    } else {
      far_.push_back(range);
    }
    ++written_;
  }
  // Memory that only this task uses while it runs, in addition to its operands. Each repetition of
  // a launch has new memory.
  void set_workspace(const MemoryRange& range) { workspace_ = {range.begin, range.end, true}; }
  // A graph's nodes report their writes themselves.
  void add_accesses_of(const Touched& other) {
    accesses_.insert(accesses_.end(), other.accesses_.begin(), other.accesses_.end());
    if (other.workspace() != nullptr) accesses_.push_back(other.workspace_);
  }

  const std::vector<Access>& accesses() const { return accesses_; }
  // Null where there is none.
  const Access* workspace() const {
    return workspace_.begin == workspace_.end ? nullptr : &workspace_;
  }
  template <class Visit>
  void each_written(Visit visit) const {
    for (size_t i = 0; i < written_; ++i) visit(i < kNear ? near_[i] : far_[i - kNear]);
  }

 private:
  static constexpr size_t kNear = 2;  // most operators write one or two tensors
  MemoryRange near_[kNear];
  size_t written_ = 0;
  std::vector<MemoryRange> far_;
  std::vector<Access> accesses_;
  Access workspace_ = {0, 0, true};
};

}  // namespace vnpu
