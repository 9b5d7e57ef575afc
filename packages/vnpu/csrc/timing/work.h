#pragma once

// Work of an operator, independent of the chip.

#include <cstdint>
#include <vector>

namespace vnpu::timing {

enum class Arithmetic : uint8_t { kInt8, kFloat16, kBfloat16, kFloat32 };

// `batch` products of [m, k] by [k, n].
struct MatrixProduct {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Arithmetic arithmetic = Arithmetic::kBfloat16;
};

struct Work {
  // Cost class: a launch's cost before and after its work, and its share of the peak.
  enum class Class : uint8_t { kVector, kMatmul, kAttention, kAiCpu, kNothing };
  Class kind = Class::kVector;
  std::vector<MatrixProduct> products;
  int64_t vector_operations = 0;  // on elements
  bool wide = false;              // of vector_operations: on 32 bits and more, else on 16
  int64_t read_bytes = 0;         // of device memory
  int64_t written_bytes = 0;
};

enum class Exchange : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,  // also what expert dispatch and combine send
  kBroadcast,
  kBarrier,
};

// A collective. `bytes`: the whole vector, that is what a rank has before an all_reduce, a
// reduce_scatter or an all_to_all, and after an all_gather or a broadcast.
struct Collective {
  Exchange exchange = Exchange::kAllReduce;
  int64_t bytes = 0;
  int64_t ranks = 1;
  int64_t stride = 1;  // distance between the numbers of ranks
};

}  // namespace vnpu::timing
