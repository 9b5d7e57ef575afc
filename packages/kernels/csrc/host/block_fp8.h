#pragma once

// fp8 weights with a scale per block, on the host. Shapes and meaning: `vllm_davinci.operators`.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace davinci {

at::Tensor block_fp8_floats(const at::Tensor& weight, const at::Tensor& scale, int64_t block_rows,
                            int64_t block_columns, at::ScalarType dtype, at::TensorList spares);
std::tuple<at::Tensor, at::Tensor> block_fp8_integers(const at::Tensor& weight,
                                                      const at::Tensor& scale, int64_t block_rows,
                                                      int64_t block_columns, at::TensorList spares);

}  // namespace davinci
