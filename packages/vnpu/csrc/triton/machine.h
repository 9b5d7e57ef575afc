#pragma once

// Executes a kernel, operation by operation, one program after the other.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device/failure.h"
#include "triton/access_log.h"
#include "triton/program.h"

namespace vnpu::triton {

// A kernel with its arguments and grid.
struct Launch {
  struct Range {
    uintptr_t begin = 0;
    uintptr_t end = 0;
  };
  ProgramPtr program;
  std::array<uint32_t, 3> grid = {1, 1, 1};
  std::vector<uint64_t> arguments;  // bits
  std::vector<Range> storages;      // the tensor's, of each argument; empty for what is none
};

struct Settings {
  bool poisons = true;  // undefined results of masked lanes are poison, else 0
  // The order of programs: ascending, or random by this seed.
  bool shuffles = false;
  uint64_t seed = 0;
  bool others_may_write = false;  // other streams, while the kernel runs
  std::chrono::milliseconds limit{600'000};
};

class Machine {
 public:
  // log: null if accesses are not needed
  Machine(const Launch& launch, const Settings& settings, AccessLog* log);
  // Throws Failure with the names of kernel, program and line.
  void run();

 private:
  void run_program(std::array<uint32_t, 3> program);
  // Runs a region to its end; returns the instruction that ended it.
  const Instruction* run(const Region& region);
  void execute(const Instruction& instruction);
  bool execute_shape(const Instruction& instruction);

  void run_if(const Instruction& instruction);
  void run_for(const Instruction& instruction);
  void run_while(const Instruction& instruction);
  void call(const Instruction& instruction);
  void reduce(const Instruction& instruction);
  void scan(const Instruction& instruction);
  void combine(const Instruction& instruction, size_t lanes);
  void dot(const Instruction& instruction);
  void broadcast(const Instruction& instruction);
  void transpose(const Instruction& instruction);
  void gather(const Instruction& instruction);
  void histogram(const Instruction& instruction);
  void print(const Instruction& instruction);

  // --- memory (memory_access.cpp) ---
  struct Lanes;
  Lanes lanes_of(const Instruction& instruction, size_t bytes, size_t mask_operand);
  void require(const Instruction& instruction, const Lanes& lanes, const char* what);
  void load(const Instruction& instruction);
  void store(const Instruction& instruction);
  void atomic(const Instruction& instruction);
  void compare_and_swap(const Instruction& instruction);
  void note(const Instruction& instruction, const Lanes& lanes, bool write, bool is_atomic,
            bool changes);

  const Value& value(uint32_t number) const { return program_.values[number]; }
  std::byte* data(uint32_t number) const { return frame_ + program_.values[number].offset; }
  template <class T>
  T* as(uint32_t number) const {
    return reinterpret_cast<T*>(data(number));
  }
  size_t count_of(const Value& of) const { return lanes_ != 0 ? lanes_ : of.count; }
  int64_t integer(uint32_t number) const;
  void copy(uint32_t to, uint32_t from);
  void copy_all(const std::vector<uint32_t>& to, const uint32_t* from, size_t count);
  // Ends a kernel that would run forever.
  void tick(const Instruction& instruction);
  [[noreturn]] void fail(const Instruction& instruction, FailureKind kind,
                         const std::string& text) const;

  const Launch& launch_;
  const Program& program_;
  const Settings settings_;
  AccessLog* const log_;
  std::byte* frame_ = nullptr;
  std::array<uint32_t, 3> id_ = {};
  size_t lanes_ = 0;  // lanes of a combination; 0: those of the values
  uint64_t ticks_ = 0;
  uint64_t stores_ = 0;
  std::chrono::steady_clock::time_point deadline_;
  std::vector<std::byte> scratch_;
};

}  // namespace vnpu::triton
