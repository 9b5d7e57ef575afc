#pragma once

// Weights in the order in which oneDNN's block kernels read them: blocks of columns, row after row
// in each block (for 16-bit floats two rows at a time, one pair per column).

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

namespace vnpu::ops {

// The right operand of a product, a matrix [depth, columns] in its own memory. Strides count
// elements; one of the two is 1.
struct Weight {
  const void* data;
  at::ScalarType dtype;  // bfloat16, float16 or float32
  int64_t depth, columns;
  int64_t depth_stride, column_stride;

  bool operator==(const Weight&) const = default;
};

// How a weight is divided. float16 is stored as float32: most processors multiply nothing narrower.
struct Blocking {
  explicit Blocking(const Weight& weight);
  // Columns of a block, without and with its padding.
  int64_t width(int64_t block) const { return std::min(columns, total_columns - block * columns); }
  int64_t padded_width(int64_t block) const {
    return (width(block) + kLanes - 1) / kLanes * kLanes;
  }

  static constexpr int64_t kLanes = 16;  // AMX reads this number of columns
  at::ScalarType dtype;                  // of an element: bfloat16 or float32
  int64_t depth;                         // rows, padded to pairs
  int64_t columns;                       // of a block; the last block may be padded with zeros
  int64_t total_columns;
  int64_t blocks;
  size_t block_bytes;  // of a whole block
};

// Writes one block of the weight. `out`: room for blocking.block_bytes.
void write_block(const Weight& weight, const Blocking& blocking, int64_t block, std::byte* out);

// All blocks of a weight, block i at i * blocking.block_bytes.
using Blocks = std::shared_ptr<const std::byte[]>;

// Caches the blocks of weights in device memory, from their second use on (a weight is used more
// than once) until the memory changes or is freed. Each copy takes as much host memory as the
// weight; all together at most a quarter of the host's.
class BlockedWeights {
 public:
  static BlockedWeights& instance();
  // The blocks, or null for a weight that is not cached: the caller then writes the blocks itself.
  Blocks find(const Weight& weight, const Blocking& blocking);

 private:
  struct Implementation;
  BlockedWeights();
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace vnpu::ops
