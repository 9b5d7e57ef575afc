#pragma once

// FRACTAL_NZ and the plain layouts (aclFormat) of the older interface's tensors.

#include <cstdint>
#include <vector>

#include "ops/operator.h"

namespace vnpu::ops {

// The tensor of `sizes` that lies in `memory`, all of it and dense, in `format`.
Tensor plain_of(const Tensor& memory, int64_t format, const std::vector<int64_t>& sizes);
// Writes the tensor of `sizes`, of the dtype of `memory`, in `format`.
void lay_out(const Tensor& source, const Tensor& memory, int64_t format,
             const std::vector<int64_t>& sizes);

}  // namespace vnpu::ops
