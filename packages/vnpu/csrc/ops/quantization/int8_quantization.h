#pragma once

// Rounding to int8, as the fused operators of this library do it.

#include "ops/operator.h"

namespace vnpu::ops {

// To the nearest integer, halves to even, clamped to int8's range. NaN becomes 0.
inline Tensor to_int8(const Tensor& values) {
  return at::nan_to_num(values.round(), /*nan=*/0.0).clamp(-128, 127).to(at::kChar);
}

// values [..., columns] float32 -> rows of int8 and their scale: value = int8 * scale.
inline std::pair<Tensor, Tensor> quantize_rows(const Tensor& values) {
  const Tensor largest = values.abs().amax(-1, /*keepdim=*/true);
  return {to_int8(values * (127.0 / largest)), (largest / 127.0).squeeze(-1)};
}

}  // namespace vnpu::ops
