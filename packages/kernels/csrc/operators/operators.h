#pragma once

// The functions behind op_table.inc, by family. Shapes and meaning: README.md and reference.py.
// Each checks what aclnn does not, launches on the current stream, and returns new tensors.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace davinci {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// The same functions twice: on the NPU, and on meta tensors, where only shapes are computed.
#define DAVINCI_DECLARE_OPERATORS                                                             \
  /* norm.cpp */                                                                              \
  Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon);                     \
  std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,            \
                                          const Tensor& weight, double epsilon);              \
  std::tuple<Tensor, Tensor> add_rms_norm_quant(                                              \
      const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& scale,     \
      const Tensor& offset, const OptionalTensor& bias, double epsilon);                      \
  std::tuple<Tensor, Tensor, Tensor> add_rms_norm_dynamic_quant(                              \
      const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon);         \
  /* rotary.cpp */                                                                            \
  std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query,   \
                                              const Tensor& key, const Tensor& cos_sin_cache, \
                                              int64_t head_size, bool is_neox_style);         \
  /* vocabulary.cpp */                                                                        \
  std::tuple<Tensor, Tensor> vocabulary_mask(const Tensor& token_ids, int64_t first_row,      \
                                             int64_t num_rows);                               \
  Tensor vocab_parallel_embedding(const Tensor& token_ids, const Tensor& weight,              \
                                  int64_t first_row, int64_t num_rows);                       \
  /* kv_cache.cpp */                                                                          \
  void copy_kv_blocks(at::TensorList kv_caches, const Tensor& block_pairs);

namespace npu {
DAVINCI_DECLARE_OPERATORS
}
namespace meta {
DAVINCI_DECLARE_OPERATORS
}
#undef DAVINCI_DECLARE_OPERATORS

}  // namespace davinci
