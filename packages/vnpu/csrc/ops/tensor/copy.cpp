// Copies, casts and changes of layout: elements move, their values stay (up to a cast).

#include <limits>

#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

const std::vector<ScalarType> kAnyNumbers = with(kNumbers, {at::kUInt16, at::kUInt32, at::kUInt64});
// All copies that torch_npu cannot do as a plain memory copy: casts, strides, broadcasts.
VNPU_OPERATOR(InplaceCopy, (Out self, const Tensor& src),
              {.cost = elements<1>,
               .rules = {"aclnn_copy.cpp: DTYPE_SUPPORT_LIST, CheckShape",
                         {{"self, src", dtype(kAnyNumbers), kOnBigChips}, {"src", dims(0, 8)}}}}) {
  store(self, src);
}
VNPU_OPERATOR(Cast, (const Tensor& self, DType dtype, Out out),
              {.cost = elements<1>,
               .rules = {"OP_CHECK_SHAPE_NOT_EQUAL in aclnn_cast.cpp",
                         {{"out", same_sizes("self")}}}}) {
  require(dtype.type == out.tensor.scalar_type(), "dtype differs from the output's.");
  store(out, self);
}

// --- joining and splitting ----------------------------------------------------------------------

// Empty one-dimensional tensors may stand anywhere in the list.
VNPU_OPERATOR(Cat, (const TensorList& tensors, int64_t dim, Out out),
              {.cost = elements<1>,
               .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_cat.cpp",
                         {{"out", dtype(with(kRealAndBool, {at::kComplexFloat})), kOnBigChips}}}}) {
  at::cat_out(out.tensor, static_cast<const std::vector<Tensor>&>(tensors), dim);
}
VNPU_OPERATOR(Stack, (const TensorList& tensors, int64_t dim, Out out),
              {.cost = elements<1>,
               .rules = {"ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST in aclnn_stack.cpp",
                         {{"tensors, out", dtype(kAnyNumbers), kOnBigChips}}}}) {
  at::stack_out(out.tensor, static_cast<const std::vector<Tensor>&>(tensors), dim);
}
VNPU_OPERATOR(SplitWithSize,
              (const Tensor& self, const IntArray& split_sizes, int64_t dim, const OutList& out),
              {.cost = elements<1>}) {
  require(split_sizes.size() == out.size(), "splitSize and out differ in length.");
  const std::vector<Tensor> parts = self.split_with_sizes(split_sizes, dim);
  for (size_t i = 0; i < parts.size(); ++i) store(out[i], parts[i]);
}

// --- repeating ----------------------------------------------------------------------------------

VNPU_OPERATOR(Repeat, (const Tensor& self, const IntArray& repeats, Out out),
              {.cost = elements<1>,
               .rules = {"OP_CHECK_DTYPE_NOT_SAME in aclnn_repeat.cpp",
                         {{"out", same_dtype("self")}}}}) {
  store(out, self.repeat(repeats));
}

constexpr char kInterleave[] =
    "aclnn_repeat_interleave.cpp: dtype list for 910B, CheckIntRepeatsRange";
// Without a dim, the flattened input is repeated.
VNPU_OPERATOR(RepeatInterleave,
              (const Tensor& self, const Tensor& repeats, int64_t output_size, Out out),
              {.cost = elements<1>,
               .rules = {kInterleave,
                         {{"self",
                           dtype(with(kFloats, {at::kByte, at::kChar, at::kShort, at::kInt,
                                                at::kLong, at::kBool})),
                           kOnBigChips},
                          {"repeats", dtype(kIndices)},
                          {"out", same_dtype("self")}}}}) {
  store(out, self.repeat_interleave(repeats, std::nullopt, output_size));
}

static Rules rules_of_repeat_interleave_int() {
  return {
      kInterleave,
      {{"self",
        dtype(with(kFloats, {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool})),
        kOnBigChips},
       {"repeats", between(0, std::numeric_limits<int64_t>::max())},
       {"out", same_dtype("self")}}};
}
VNPU_OPERATOR(RepeatInterleaveInt,
              (const Tensor& self, int64_t repeats, int64_t output_size, Out out),
              {.cost = elements<1>, .rules = rules_of_repeat_interleave_int()}) {
  store(out, self.repeat_interleave(repeats, std::nullopt, output_size));
}
VNPU_OPERATOR(RepeatInterleaveWithDim,
              (const Tensor& self, const Tensor& repeats, int64_t dim, int64_t output_size,
               Out out),
              {.cost = elements<1>}) {
  store(out, self.repeat_interleave(repeats, dim, output_size));
}
VNPU_OPERATOR(RepeatInterleaveIntWithDim,
              (const Tensor& self, int64_t repeats, int64_t dim, int64_t output_size, Out out),
              {.cost = elements<1>, .rules = rules_of_repeat_interleave_int()}) {
  store(out, self.repeat_interleave(repeats, dim, output_size));
}
// Index i, repeats[i] times.
VNPU_OPERATOR(RepeatInterleaveTensor, (const Tensor& repeats, int64_t output_size, Out out),
              {.cost = elements<1>}) {
  store(out, at::repeat_interleave(repeats, std::optional<int64_t>(output_size)));
}

// --- reordering, padding, masking ---------------------------------------------------------------

VNPU_OPERATOR(Flip, (const Tensor& self, const IntArray& dims, Out out),
              {.cost = elements<1>,
               .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_flip.cpp",
                         {{"self", dtype(kNumbers), kOnBigChips}}}}) {
  store(out, self.flip(dims));
}
// Without dims, the flattened input is rolled.
VNPU_OPERATOR(Roll, (const Tensor& x, const IntArray& shifts, const IntArray& dims, Out out),
              {.cost = elements<1>}) {
  store(out, x.roll(shifts, dims));
}
// Pairs (before, after), from the last dimension on; negative pads cut.
VNPU_OPERATOR(ConstantPadNd,
              (const Tensor& self, const IntArray& pad, const Scalar& value, Out out),
              {.cost = elements<1>,
               .rules = {
                   "DTYPE_SUPPORT_910B_LIST in aclnn_constant_pad_nd.cpp",
                   {{"self", dtype(kAnyNumbers), kOnBigChips}, {"out", same_dtype("self")}}}}) {
  store(out, at::constant_pad_nd(self, pad, value));
}
VNPU_OPERATOR(Triu, (const Tensor& self, int64_t diagonal, Out out),
              {.cost = elements<1>,
               .rules = {"aclnn_triu.cpp: DTYPE_SUPPORT_LIST_910B, OP_CHECK_SHAPE_NOT_EQUAL",
                         {{"self", dtype(kAnyReal), kOnBigChips},
                          {"self", dims(2, 8)},
                          {"out", {same_dtype("self"), same_sizes("self")}}}}}) {
  at::triu_out(out.tensor, self, diagonal);
}
VNPU_OPERATOR(Tril, (const Tensor& self, int64_t diagonal, Out out), {.cost = elements<1>}) {
  at::tril_out(out.tensor, self, diagonal);
}
VNPU_OPERATOR(InplaceTriu, (InOut self, int64_t diagonal), {.cost = elements<1>}) {
  self.tensor.triu_(diagonal);
}
VNPU_OPERATOR(InplaceTril, (InOut self, int64_t diagonal), {.cost = elements<1>}) {
  self.tensor.tril_(diagonal);
}
// Sliding blocks as columns (torch.nn.functional.unfold).
VNPU_OPERATOR(Im2col,
              (const Tensor& self, const IntArray& kernel_size, const IntArray& dilation,
               const IntArray& padding, const IntArray& stride, Out out),
              {.cost = elements<1>}) {
  at::im2col_out(out.tensor, self, kernel_size, dilation, padding, stride);
}

}  // namespace vnpu::ops
