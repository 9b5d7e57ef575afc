#pragma once

// Reads and writes of one launch's programs, for the race detector.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device/touched.h"
#include "triton/program.h"

namespace vnpu::triton {

class AccessLog {
 public:
  struct Entry {
    uintptr_t begin;
    uintptr_t end;
    uint32_t program;  // its number in the grid
    bool write;
    bool is_atomic;
    bool changes;  // a write of other bytes than there were
    const Instruction* instruction;
  };

  void add(const Entry& entry) { entries_.push_back(entry); }

  // For the detector: adjacent entries of one line merged, rows at a constant distance as one
  // layout.
  std::vector<Access> accesses(const std::array<uint32_t, 3>& grid) const;

  // One program wrote memory that another used, and not both by atomic operations: their order is
  // not defined. Writes of the same bytes do not count.
  struct Conflict {
    Entry first;
    Entry second;
  };
  std::optional<Conflict> conflict() const;

 private:
  std::vector<Entry> entries_;
};

// Coordinates of a program in the grid, x first.
std::array<uint32_t, 3> coordinates(uint32_t program, const std::array<uint32_t, 3>& grid);

}  // namespace vnpu::triton
