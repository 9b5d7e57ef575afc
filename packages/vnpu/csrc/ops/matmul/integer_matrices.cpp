#include "ops/matmul/integer_matrices.h"

namespace vnpu::ops {

Tensor multiply_integers(const Tensor& a, const Tensor& b) {
  if (a.size(-1) != b.size(-2)) {
    refuse("matrices of sizes " + c10::str(a.sizes()) + " and " + c10::str(b.sizes()) +
           " cannot be multiplied.");
  }
  // A float32 sum of 1024 products of int8 is exact in any order: at most 2^14 * 2^10 = 2^24.
  constexpr int64_t kExactDepth = 1024;
  const int64_t depth = a.size(-1);
  Tensor sum;
  for (int64_t k = 0; k < std::max<int64_t>(1, depth); k += kExactDepth) {
    const int64_t count = std::min(kExactDepth, depth - k);
    const Tensor part =
        at::matmul(a.narrow(-1, k, count).to(at::kFloat), b.narrow(-2, k, count).to(at::kFloat))
            .to(at::kInt);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  return sum;
}

Tensor unpack_int4(const Tensor& packed) {
  const Tensor wide = packed.contiguous().unsqueeze(-1);
  const Tensor shifts = at::arange(28, -1, -4, at::kInt);  // left, so that the sign comes back down
  std::vector<int64_t> sizes(packed.sizes().begin(), packed.sizes().end());
  sizes.back() *= 8;
  return wide.bitwise_left_shift(shifts).bitwise_right_shift(28).to(at::kChar).reshape(sizes);
}

Tensor pack_int4(const Tensor& values) {
  if (values.size(-1) % 8 != 0) {
    refuse("4-bit integers are stored by eights; the last dimension is " +
           std::to_string(values.size(-1)) + ".");
  }
  const Tensor nibbles = values.contiguous().unflatten(-1, {-1, 8}).to(at::kInt).bitwise_and(15);
  const Tensor placed = nibbles.bitwise_left_shift(at::arange(0, 32, 4, at::kInt));
  return placed.sum(-1, /*keepdim=*/false, at::kLong).to(at::kInt);  // wraps around the sign bit
}

Tensor integer_matrix(const Tensor& matrix, int64_t rows) {
  if (matrix.scalar_type() == at::kChar) return matrix;
  if (matrix.scalar_type() != at::kInt) {
    refuse(std::string("a matrix of 8-bit or packed 4-bit integers is expected, not ") +
           c10::toString(matrix.scalar_type()) + ".");
  }
  return matrix.size(-2) != rows && matrix.size(-2) * 8 == rows
             ? unpack_int4(matrix.transpose(-1, -2)).transpose(-1, -2)
             : unpack_int4(matrix);
}

Tensor float_scales(const Tensor& scales) {
  if (scales.scalar_type() != at::kLong && scales.scalar_type() != at::kUInt64)
    return scales.to(at::kFloat);
  const Tensor bits = scales.contiguous().view(at::kLong);
  return bits.bitwise_and(INT64_C(0xffffffff)).to(at::kInt).view(at::kFloat);
}

Tensor multiply_halves(const Tensor& rows, const Tensor& weight, const Tensor& scales,
                       const Tensor& of_eights) {
  const Tensor given = float_scales(scales);
  const Tensor scale = given.dim() < 2 ? given.reshape({1, -1}) : given;
  const int64_t depth = rows.size(-1) / scale.size(0);
  const Tensor halves =
      at::cat({rows.bitwise_right_shift(4), rows.bitwise_and(15).sub(8)}).to(at::kChar);
  Tensor sum = at::zeros({halves.size(0), weight.size(-1)}, at::kHalf);
  for (int64_t group = 0; group < scale.size(0); ++group) {
    const Tensor part = multiply_integers(halves.narrow(-1, group * depth, depth),
                                          weight.narrow(-2, group * depth, depth));
    sum.add_((part.to(at::kFloat) * scale[group]).to(at::kHalf));
  }
  const auto high_and_low = sum.to(at::kFloat).chunk(2);
  return high_and_low[0] * 16 + high_and_low[1] + of_eights.to(at::kFloat);
}

Tensor dense_weight(const LaidOut& weight) {
  const Tensor matrix = weight.matrix();
  if (matrix.dim() != 5) return matrix;
  // [experts, columns / c, rows / 16, 16, c]
  return matrix.permute({0, 2, 3, 1, 4})
      .reshape({matrix.size(0), matrix.size(2) * matrix.size(3), matrix.size(1) * matrix.size(4)});
}

}  // namespace vnpu::ops
