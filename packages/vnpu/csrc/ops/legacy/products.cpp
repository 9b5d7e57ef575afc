// Legacy products of matrices: what Linear with weights in FRACTAL_NZ asks for.

#include "ops/legacy/legacy_operator.h"

namespace vnpu::ops {
namespace {

// Sums are float32 and rounded once.
Results product(const LegacyArguments& a, const char* transpose1, const char* transpose2) {
  a.pass_over({"offset_x", "bias"});  // only for integers; tells if input 2 exists
  const auto operand = [&](size_t index, const char* transpose) {
    const Tensor wide = widen(a[index]);
    return a.flag(transpose) ? wide.transpose(-1, -2) : wide;
  };
  const Tensor result = at::matmul(operand(0, transpose1), operand(1, transpose2));
  return {a.has(2) ? result + widen(a[2]) : result};
}

const bool matrices = legacy(
    "MatMul MatMulV2",
    [](const LegacyArguments& a) { return product(a, "transpose_x1", "transpose_x2"); },
    LegacyWork::kProduct);
const bool batches = legacy(
    "BatchMatMul BatchMatMulV2",
    [](const LegacyArguments& a) { return product(a, "adj_x1", "adj_x2"); }, LegacyWork::kProduct);

}  // namespace
}  // namespace vnpu::ops
