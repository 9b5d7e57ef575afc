// What reductions, softmax and draws of random numbers can be called with.
// Sources: the dtype lists for Ascend910B in aclnn_*.cpp of ops-math and ops-nn v8.5.0, which the
// documents repeat. They say nothing of 310P here.

#include "ops/dtype_lists.h"
#include "ops/reduction/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kSum[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_reduce_sum.cpp";
constexpr char kAmax[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_amax.cpp";
constexpr char kMax[] = "DTYPE_SUPPORT_GE910B_LIST in aclnn_{max,min}.cpp";
constexpr char kMean[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_mean.cpp";
constexpr char kNorm[] = "aclnnLinalgVectorNorm.md, parameters";
constexpr char kCumprod[] = "DTYPE_SUPPORT_LIST, CheckShape in aclnn_cumprod.cpp";
constexpr char kNormal[] = "DTYPE_SUPPORT_LIST in aclnn_normal.cpp";
constexpr char kCumsum[] = "aclnn_cumsum.cpp: ASCEND910B_DTYPE_SUPPORT_LIST, CheckShape";
constexpr char kArgMax[] = "ops-math math/arg_max_v2/docs/aclnnArgMax.md, parameters";
constexpr char kSoftmax[] = "aclnn_{softmax,logsoftmax}.cpp: dtype lists, CheckShape";
constexpr char kAny[] = "aclnn_{any,all}.cpp: dtype lists for 910B, out_dtype_support_list";
constexpr char kLogSumExp[] = "ops-math math/reduce_log_sum_exp/docs/aclnnLogSumExp.md, parameters";
constexpr char kUniform[] = "DTYPE_SUPPORT_LIST in aclnn_uniform.cpp";

const std::vector<ScalarType> kFloatsAndDouble = with(kFloats, {at::kDouble});

}  // namespace

Allowed allowed_reduce_sum() {
  return {
      {},
      {{"self", dtype(kNumbers), kSum, kOnBigChips}, {"out", dtype(kNumbers), kSum, kOnBigChips}}};
}

Allowed allowed_amax() {
  return {{},
          {{"self", dtype(kRealAndBool), kAmax, kOnBigChips}, {"out", same_dtype("self"), kAmax}}};
}

Allowed allowed_log_sum_exp() {
  const auto numbers =
      with(kFloats, {at::kInt, at::kLong, at::kShort, at::kChar, at::kByte, at::kBool});
  return {{},
          {{"self", dtype(numbers), kLogSumExp, kOnBigChips},
           {"out", dtype(kFloats), kLogSumExp, kOnBigChips}}};
}

Allowed allowed_max() {
  return {{},
          {{"self", dtype(kRealAndBool), kMax, kOnBigChips},
           {"out", dtype(kRealAndBool), kMax, kOnBigChips}}};
}

Allowed allowed_mean() {
  return {{},
          {{"self", dtype(kRealAndComplex), kMean, kOnBigChips},
           {"out", dtype(kRealAndComplex), kMean, kOnBigChips}}};
}

Allowed allowed_linalg_vector_norm() {
  return {
      {},
      {{"self", dtype(kFloats), kNorm, kOnBigChips}, {"out", dtype(kFloats), kNorm, kOnBigChips}}};
}

Allowed allowed_cumprod() {
  return {{},
          {{"input", dtype(with(kReal, {at::kUInt16, at::kUInt32, at::kUInt64})), kCumprod,
            kOnBigChips},
           {"dim", dtype({at::kInt, at::kLong}), kCumprod},
           {"out", same_sizes("input"), kCumprod}}};
}

Allowed allowed_inplace_normal() {
  return {{}, {{"self", dtype(kRealAndBool), kNormal, kOnBigChips}}};
}

Allowed allowed_cumsum() {
  return {{},
          {{"out", dtype(kRealAndComplex), kCumsum, kOnBigChips},
           {"out", same_sizes("self"), kCumsum}}};
}

Allowed allowed_arg_max() {
  return {{},
          {{"self", dtype(kReal), kArgMax, kOnBigChips},
           {"dim",
            fits("be a dimension of self", {"self"},
                 [](const RuleArguments& own) -> Found {
                   const int64_t dims = std::max<int64_t>(own.tensor(1).dims, 1);
                   if (own.integer() >= -dims && own.integer() < dims) return std::nullopt;
                   return std::to_string(own.integer()) + " beside sizes " +
                          sizes_of(own.tensor(1));
                 }),
            kArgMax},
           {"out", dtype({at::kInt, at::kLong}), kArgMax}}};
}

Allowed allowed_any() {
  return {{},
          {{"self",
            dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kInt, at::kLong,
                   at::kShort, at::kChar, at::kByte, at::kBool}),
            kAny, kOnBigChips},
           {"out", dtype({at::kByte, at::kBool}), kAny}}};
}

Allowed allowed_softmax() {
  return {{},
          {{"self", dtype(kFloatsAndDouble), kSoftmax, kOnBigChips},
           {"out", dtype(kFloatsAndDouble), kSoftmax, kOnBigChips},
           {"out", same_sizes("self"), kSoftmax}}};
}

Allowed allowed_inplace_uniform() { return {{}, {{"self", dtype(kReal), kUniform, kOnBigChips}}}; }

}  // namespace vnpu::ops
