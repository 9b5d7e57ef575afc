// Tensors made from numbers: fills, ranges, identity and one-hot.

#include <cmath>
#include <limits>

#include "device/memory.h"
#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// Zero bytes, not just a zero value: -0.0 has its sign bit.
bool is_zero_bytes(const Scalar& value) {
  if (value.isComplex()) return false;
  return value.isFloatingPoint() ? value.toDouble() == 0.0 && !std::signbit(value.toDouble())
                                 : value.equal(0);
}

void fill(const WholeOut& out, const Scalar& value) {
  if (is_zero_bytes(value) && out.tensor.is_non_overlapping_and_dense()) {
    // Filled by the device memory, which gives large ranges' pages back instead of writing zeros.
    const auto [begin, end] = out.view.extent();
    if (begin != end) Memory::instance().zero(reinterpret_cast<void*>(begin), end - begin);
    return;
  }
  out.tensor.fill_(value);
}

// `made` has as many elements as the caller computed from the same numbers.
void store_counted(const Out& out, const Tensor& made) {
  if (made.numel() != out.tensor.numel()) {
    refuse("the range has " + std::to_string(made.numel()) +
           " elements but the output has room for " + std::to_string(out.tensor.numel()) + ".");
  }
  store(out, made.reshape(out.tensor.sizes()));
}

}  // namespace

VNPU_OPERATOR(InplaceZero, (WholeOut self),
              {.cost = elements<1>,
               .rules = {"DTYPE_SUPPORT_LIST in aclnn_zero.cpp",
                         {{"self", dtype(with(kNumbers, {at::kUInt16})), kOnBigChips}}}}) {
  fill(self, 0);
}
VNPU_OPERATOR(InplaceOne, (WholeOut self),
              {.cost = elements<1>,
               .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_ones.cpp",
                         {{"self", dtype(kRealAndBool), kOnBigChips}}}}) {
  fill(self, 1);
}
VNPU_OPERATOR(InplaceFillScalar, (WholeOut self, const Scalar& value),
              {.cost = elements<1>,
               .rules = {"DTYPE_SUPPORT_GE910B_LIST in aclnn_fill_scalar.cpp",
                         {{"self", dtype(kNumbers), kOnBigChips}}}}) {
  fill(self, value);
}
VNPU_OPERATOR(InplaceFillTensor, (InOut self, const Tensor& value), {.cost = elements<1>}) {
  require(value.numel() == 1, "value must have one element.");
  store(self, value.reshape({}));
}

VNPU_OPERATOR(
    Arange, (const Scalar& start, const Scalar& end, const Scalar& step, Out out),
    {.cost = elements<1>,
     .rules = {
         "ASCEND910B_OUTPUT_DTYPE_SUPPORT_LIST in aclnn_arange.cpp",
         {{"out", dtype({at::kHalf, at::kFloat, at::kDouble, at::kLong, at::kInt, at::kBFloat16}),
           kOnBigChips}}}}) {
  store_counted(out, at::arange(start, end, step, out.tensor.options()));
}
// Like Arange with `end` included.
VNPU_OPERATOR(Range, (const Scalar& start, const Scalar& end, const Scalar& step, Out out),
              {.cost = elements<1>}) {
  store_counted(out, at::range(start, end, step, out.tensor.options()));
}
VNPU_OPERATOR(Linspace, (const Scalar& start, const Scalar& end, int64_t steps, Out out),
              {.cost = elements<1>,
               .rules = {"dtype lists in aclnn_linspace.cpp",
                         {{"out", dtype(kReal), kOnBigChips}}}}) {
  store_counted(out, at::linspace(start, end, steps, out.tensor.options()));
}
VNPU_OPERATOR(Eye, (int64_t rows, int64_t columns, Out out),
              {.cost = elements<1>,
               .rules = {"aclnn_eye.cpp: DTYPE_SUPPORT_LIST_A2, CheckShape",
                         {{"out",
                           dtype(with(kFloats, {at::kInt, at::kChar, at::kShort, at::kByte,
                                                at::kLong, at::kBool})),
                           kOnBigChips},
                          {"out", dims(2, 2)}}}}) {
  store(out, at::eye(rows, columns, out.tensor.options()));
}
static Rules rules_of_one_hot() {
  return {"aclnn_one_hot.cpp: CheckDtypeValid, CheckMaxNumClasses, CheckAxisRange, CheckShapeValid",
          {{"self", dtype(kIndices), kOnBigChips},
           {"num_classes", between(0, std::numeric_limits<int32_t>::max())},
           {"on, off", same_dtype("out")},
           {"axis", that("be -1, or at most the dimensions of self", {"self"},
                         [](const RuleArguments& own) {
                           return own.integer() >= -1 && own.integer() <= own.tensor(1).dims;
                         })},
           {"out", dtype({at::kHalf, at::kFloat, at::kInt, at::kLong}), kOnBigChips},
           {"out", fits("have the sizes of self, and numClasses at axis",
                        {"self", "num_classes", "axis"}, [](const RuleArguments& own) {
                          const TensorView& self = own.tensor(1);
                          const int64_t axis = own.integer(3) < 0 ? self.dims : own.integer(3);
                          bool same = own.tensor().dims == self.dims + 1;
                          for (int i = 0; same && i <= self.dims; ++i) {
                            same = size_of(own.tensor(), i) ==
                                   (i == axis ? own.integer(2) : size_of(self, i - (i > axis)));
                          }
                          return same;
                        })}}};
}
// A class outside [0, num_classes) has `off` everywhere.
VNPU_OPERATOR(OneHot,
              (const Tensor& self, int32_t num_classes, const Tensor& on, const Tensor& off,
               int64_t axis, Out out),
              {.cost = elements<1>, .rules = rules_of_one_hot()}) {
  const int64_t at_dim = axis == -1 ? self.dim() : axis;
  std::vector<int64_t> along(static_cast<size_t>(self.dim()) + 1, 1);
  along[static_cast<size_t>(at_dim)] = num_classes;
  const Tensor classes = at::arange(num_classes, self.options()).reshape(along);
  store(out, at::where(self.unsqueeze(at_dim) == classes, on.reshape({}), off.reshape({})));
}

}  // namespace vnpu::ops
