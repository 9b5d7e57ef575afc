#pragma once

#include "ops/operator.h"

namespace vnpu::ops {

// y = x / sqrt(mean of squares of the last dimensions + epsilon) * gamma, over gamma's dimensions,
// in float32, rounded once. y has the sizes of x.
void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Tensor& y);

}  // namespace vnpu::ops
