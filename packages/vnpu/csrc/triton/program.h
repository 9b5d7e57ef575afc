#pragma once

// A Triton kernel as vnpu executes it: Triton's operations with their regions, in order. Written by
// triton_backend/program.py.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "timing/work.h"

namespace vnpu::triton {

enum class Type : uint8_t {
  kInt1,  // a byte, 0 or 1
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kPointer,  // an address of device memory, or of mapped host memory
  kFloat8E4m3,
  kFloat8E5m2,
};
size_t bytes_of(Type type);

enum class Operation : uint8_t {
#define VNPU_TRITON(ENUMERATOR, NAME) ENUMERATOR,
#include "triton/operations.inc"
#undef VNPU_TRITON
};
// Names of all operations, in the order of the enumerators.
const std::vector<std::string>& operation_names();

// A tensor of a program, or a scalar. `offset`: bytes in the frame.
struct Value {
  Type type;
  size_t count;
  size_t offset;
  std::vector<int64_t> shape;
};

struct Block;
using Region = std::vector<Block>;

struct Instruction {
  Operation operation;
  const char* place;  // "file.py:12"
  const char* text;   // assertion's message, or prefix of the printed values
  std::vector<uint32_t> results;
  std::vector<uint32_t> operands;
  std::vector<int64_t> attributes;
  std::vector<Region> regions;
};

struct Block {
  std::vector<uint32_t> arguments;
  std::vector<Instruction> body;
};

struct Parameter {
  const char* name;
  uint32_t value;
  bool reads;   // through it, if a pointer
  bool writes;  // likewise
};

struct Constant {
  uint32_t value;
  uint64_t bits;  // of each element
};

struct Function {
  std::vector<uint32_t> arguments;
  Region body;
};

struct Program {
  // Throws Failure(kInvalidArgument) for what program.py has not written, naming it.
  explicit Program(std::string_view written);

  std::string name;
  std::vector<Value> values;
  std::vector<Parameter> parameters;
  std::vector<Constant> constants;
  std::vector<Function> functions;  // the kernel first
  size_t frame_bytes = 0;
  // Counts for one program, with each loop's body once: operations on elements, bytes, products.
  int64_t operations = 0;
  int64_t loaded_bytes = 0;
  int64_t stored_bytes = 0;
  bool has_loops = false;
  bool synchronizes = false;  // uses what an atomic operation returns: programs may wait by it
  std::vector<timing::MatrixProduct> products;

 private:
  std::string strings_;  // text of all places
};

using ProgramPtr = std::shared_ptr<const Program>;

}  // namespace vnpu::triton
