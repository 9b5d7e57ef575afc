// Matrix products with quantized operands: both as integers, or only the weight.

#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/declarations.h"
#include "ops/matmul/integer_matrices.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {
namespace {

struct QuantMatmul {
  const Tensor& x1;
  const Tensor& x2;
  OptionalTensor row_scale;  // of x1's rows
  OptionalTensor scale;      // of x2's columns, or one
  OptionalTensor offset;     // of an int8 result
  OptionalTensor bias;
  bool transpose1, transpose2;
  OptionalTensor y_offset;  // beside 4-bit weights: see `multiply_halves`
};

Tensor turned(const Tensor& matrix, bool transpose) {
  return transpose ? matrix.transpose(-1, -2) : matrix;
}

// Both operands with scales in blocks: x1's of 128 columns of a row, x2's of 128 x 128. As floats.
Tensor product_of_blocks(const QuantMatmul& call) {
  constexpr int64_t kBlock = 128;
  const Tensor x1 = turned(call.x1, call.transpose1);
  const Tensor x2 = turned(call.x2, call.transpose2);
  const Tensor row_scale = turned(*call.row_scale, call.transpose1).to(at::kFloat);
  const Tensor scale = turned(*call.scale, call.transpose2).to(at::kFloat);
  Tensor sum = at::zeros({x1.size(-2), x2.size(-1)}, at::kFloat);
  for (int64_t first = 0, block = 0; first < x1.size(-1); first += kBlock, ++block) {
    const int64_t depth = std::min(kBlock, x1.size(-1) - first);
    const Tensor part =
        multiply_integers(x1.narrow(-1, first, depth), x2.narrow(-2, first, depth)).to(at::kFloat);
    const Tensor columns = scale[block].repeat_interleave(kBlock, 0).narrow(0, 0, x2.size(-1));
    sum.add_(part * row_scale.narrow(-1, block, 1) * columns);
  }
  return sum;
}

void quant_matmul(const QuantMatmul& call, const Out& out) {
  if (out.tensor.numel() == 0) return;
  if (call.row_scale && call.row_scale->dim() == 2 && call.row_scale->size(-1) > 1) {
    const Tensor sum = product_of_blocks(call);
    store(out, call.bias ? sum + call.bias->to(at::kFloat) : sum);
    return;
  }
  if (call.x1.scalar_type() == at::kChar && call.x2.scalar_type() == at::kInt) {
    require(call.row_scale && call.scale && call.y_offset,
            "8-bit rows beside 4-bit weights need x1Scale, x2Scale and yOffset.");
    const Tensor rows = turned(call.x1, call.transpose1);
    const Tensor weight = integer_matrix(turned(call.x2, call.transpose2), rows.size(-1));
    store(out, multiply_halves(rows, weight, *call.scale, *call.y_offset) *
                   call.row_scale->to(at::kFloat).reshape({-1, 1}));
    return;
  }
  const Tensor x1_turned = turned(call.x1, call.transpose1);
  const Tensor x1 = x1_turned.scalar_type() == at::kInt ? unpack_int4(x1_turned) : x1_turned;
  require(x1.scalar_type() == at::kChar, "x1 must be int8, or int32 that holds 4-bit integers.");
  const Tensor x2 = integer_matrix(turned(call.x2, call.transpose2), x1.size(-1));
  Tensor sum = multiply_integers(x1, x2);
  const bool integer_bias = call.bias && call.bias->scalar_type() == at::kInt;
  if (integer_bias) sum = sum + *call.bias;
  if (out.tensor.scalar_type() == at::kInt) {
    store(out, sum);
    return;
  }
  require(call.scale.has_value(), "a result that is not int32 needs the scale of x2.");
  Tensor values = sum.to(at::kFloat) * float_scales(*call.scale);
  if (call.row_scale) values = values * call.row_scale->to(at::kFloat).reshape({-1, 1});
  if (call.bias && !integer_bias) values = values + call.bias->to(at::kFloat);
  if (out.tensor.scalar_type() != at::kChar) {
    store(out, values);
    return;
  }
  if (call.offset) values = values + call.offset->to(at::kFloat);
  store(out, to_int8(values));
}

struct WeightQuantMatmul {
  const Tensor& x;
  const Tensor& weight;  // [k, n] int8, or int32 that holds 4-bit integers
  const Tensor& scale;   // one, [n], or [groups, n]
  OptionalTensor offset, out_scale, bias;
};

// Spreads parameters of groups of rows over the rows of a weight [k, n].
Tensor over_rows(const Tensor& parameter, int64_t rows, int64_t group_size) {
  const Tensor wide = parameter.to(at::kFloat);
  if (wide.dim() < 2 || wide.size(0) == 1) return wide;
  const int64_t step = group_size > 0 ? group_size : (rows + wide.size(0) - 1) / wide.size(0);
  return wide.repeat_interleave(step, 0).narrow(0, 0, rows);
}

void weight_quant_matmul(const WeightQuantMatmul& call, int64_t group_size, const Out& out) {
  if (out.tensor.numel() == 0) return;
  const int64_t rows = call.x.size(-1);
  const Tensor integers = integer_matrix(call.weight, rows);
  if (integers.size(-2) != rows) {
    refuse("x has " + std::to_string(rows) + " columns, weight " +
           std::to_string(integers.size(-2)) + " rows.");
  }
  Tensor weight = integers.to(at::kFloat);
  if (call.offset) weight = weight + over_rows(*call.offset, rows, group_size);
  weight = weight * over_rows(float_scales(call.scale), rows, group_size);
  // The matrix unit multiplies numbers of one dtype: the vector unit rounds the weight to x's.
  weight = weight.to(call.x.scalar_type()).to(at::kFloat);
  Tensor values = multiply_rows(call.x.to(at::kFloat), weight);
  if (call.bias) values = values + call.bias->to(at::kFloat);
  if (call.out_scale) values = values * float_scales(*call.out_scale);
  store(out, out.tensor.scalar_type() == at::kChar ? to_int8(values) : values);
}

}  // namespace

VNPU_OPERATOR(QuantMatmulV5,
              (const Tensor& x1, const Tensor& x2, const OptionalTensor& x1_scale,
               const OptionalTensor& x2_scale, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor& x2_offset, const OptionalTensor& y_offset,
               const OptionalTensor& bias, bool transpose1, bool transpose2,
               [[maybe_unused]] int64_t group_size, Out out),
              {.tier = kT2, .cost = cost_of_quant_matmul_v5, .allowed = allowed_quant_matmul_v5}) {
  quant_matmul({x1, x2, x1_scale, x2_scale, x2_offset, bias, transpose1, transpose2, y_offset},
               out);
}
VNPU_OPERATOR(QuantMatmulWeightNz,
              (const Tensor& x1, const LaidOut& x2, const OptionalTensor& x1_scale,
               const OptionalTensor& x2_scale, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor& x2_offset, const OptionalTensor&, const OptionalTensor& bias,
               bool transpose1, bool transpose2, int64_t, Out out),
              {.tier = kT2,
               .cost = cost_of_quant_matmul_v5,
               .allowed = allowed_quant_matmul_weight_nz}) {
  quant_matmul({x1, x2.matrix(), x1_scale, x2_scale, x2_offset, bias, transpose1, transpose2, {}},
               out);
}

VNPU_OPERATOR(WeightQuantBatchMatmulV2,
              (const Tensor& x, const LaidOut& weight, const Tensor& scale,
               const OptionalTensor& offset, const OptionalTensor& out_scale, const OptionalTensor&,
               const OptionalTensor& bias, int32_t group_size, Out out),
              {.tier = kT2,
               .cost = cost_of_weight_quant_batch_matmul_v2,
               .allowed = allowed_weight_quant_batch_matmul_v2}) {
  weight_quant_matmul({x, weight.matrix(), scale, offset, out_scale, bias}, group_size, out);
}
VNPU_OPERATOR(WeightQuantBatchMatmulV3,
              (const Tensor& x, const LaidOut& weight, const Tensor& scale,
               const OptionalTensor& offset, const OptionalTensor& out_scale, const OptionalTensor&,
               const OptionalTensor& bias, int32_t group_size, int32_t, Out out),
              {.tier = kT2,
               .cost = cost_of_weight_quant_batch_matmul_v2,
               .allowed = allowed_weight_quant_batch_matmul_v2}) {
  weight_quant_matmul({x, weight.matrix(), scale, offset, out_scale, bias}, group_size, out);
}
VNPU_OPERATOR(WeightQuantBatchMatmulNz,
              (const Tensor& x, const LaidOut& weight, const Tensor& scale,
               const OptionalTensor& offset, const OptionalTensor& out_scale, const OptionalTensor&,
               const OptionalTensor& bias, int32_t group_size, Out out),
              {.tier = kT2, .cost = cost_of_weight_quant_batch_matmul_v2}) {
  weight_quant_matmul({x, weight.matrix(), scale, offset, out_scale, bias}, group_size, out);
}

}  // namespace vnpu::ops
