// Reductions and scans. An empty list of dims means all of them. 16-bit floats accumulate in fp32,
// as ATen's own kernels do.

#include <algorithm>
#include <vector>

#include "ops/float_rows.h"
#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

at::OptionalIntArrayRef all_if_empty(const IntArray& dims) {
  if (dims.empty()) return std::nullopt;
  return at::IntArrayRef(dims);
}

void store_pair(const Out& first, const Out& second, const std::tuple<Tensor, Tensor>& result) {
  store(first, std::get<0>(result));
  store(second, std::get<1>(result));
}

// rows [count, columns], dense -> index of the first maximum of each row. False if a row has a NaN.
template <class Index, class T>
bool argmax_rows(const T* rows, int64_t columns, int64_t count, Index* out) {
  std::vector<float> row(std::is_same_v<T, float> ? 0 : columns);
  for (int64_t i = 0; i < count; ++i) {
    const T* source = rows + i * columns;
    int64_t found = -1;
    if constexpr (std::is_same_v<T, float>) {
      found = float_rows::argmax(source, columns);
    } else {
      float_rows::load(source, row.data(), columns);
      found = float_rows::argmax(row.data(), columns);
    }
    if (found < 0) return false;
    out[i] = static_cast<Index>(found);
  }
  return true;
}

template <class T>
bool argmax_rows(const Tensor& self, const Tensor& out) {
  const int64_t columns = self.size(-1);
  const T* rows = self.const_data_ptr<T>();
  if (out.scalar_type() == at::kInt) {
    return argmax_rows(rows, columns, out.numel(), out.mutable_data_ptr<int32_t>());
  }
  return argmax_rows(rows, columns, out.numel(), out.mutable_data_ptr<int64_t>());
}

// Greedy sampling's argmax, at each step: in a tenth of ATen's time for float32, a fortieth for
// bfloat16. Returns false if ATen has to compute it: for other dims, layouts and types, and NaN.
bool argmax_of_rows(const Tensor& self, int64_t dim, const Tensor& out) {
  const bool is_last = dim == -1 || dim == self.dim() - 1;
  const bool is_index = out.scalar_type() == at::kLong || out.scalar_type() == at::kInt;
  if (self.dim() == 0 || self.numel() == 0 || !is_last || !is_index || !self.is_contiguous() ||
      !out.is_contiguous() || out.numel() != self.numel() / self.size(-1)) {
    return false;
  }
  if (self.scalar_type() == at::kFloat) return argmax_rows<float>(self, out);
  if (self.scalar_type() == at::kBFloat16) return argmax_rows<at::BFloat16>(self, out);
  return false;
}

// 16-bit floats are multiplied in float32 and rounded once.
ScalarType accumulator_of(ScalarType type) {
  return at::isReducedFloatingType(type) ? at::kFloat : type;
}

}  // namespace

// --- sums, means, products ----------------------------------------------------------------------

VNPU_OPERATOR(ReduceSum,
              (const Tensor& self, const IntArray& dims, bool keep_dims, DType dtype, Out out),
              {.cost = elements<2>,
               .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_reduce_sum.cpp",
                         {{"self, out", dtype(kNumbers), kOnBigChips}}}}) {
  at::sum_out(out.tensor, self, all_if_empty(dims), keep_dims, dtype.type);
}
VNPU_OPERATOR(Mean,
              (const Tensor& self, const IntArray& dims, bool keep_dims, DType dtype, Out out),
              {.cost = elements<2>,
               .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_mean.cpp",
                         {{"self, out", dtype(kRealAndComplex), kOnBigChips}}}}) {
  at::mean_out(out.tensor, self, all_if_empty(dims), keep_dims, dtype.type);
}
VNPU_OPERATOR(Prod, (const Tensor& self, DType dtype, Out out), {.cost = elements<2>}) {
  store(out, at::prod(widen(self), accumulator_of(dtype.type)));
}
VNPU_OPERATOR(ProdDim, (const Tensor& self, int64_t dim, bool keep_dim, DType dtype, Out out),
              {.cost = elements<2>}) {
  store(out, at::prod(widen(self), dim, keep_dim, accumulator_of(dtype.type)));
}

static Rules rules_of_log_sum_exp() {
  const auto numbers =
      with(kFloats, {at::kInt, at::kLong, at::kShort, at::kChar, at::kByte, at::kBool});
  return {"ops-math math/reduce_log_sum_exp/docs/aclnnLogSumExp.md, parameters",
          {{"self", dtype(numbers), kOnBigChips}, {"out", dtype(kFloats), kOnBigChips}}};
}
VNPU_OPERATOR(LogSumExp, (const Tensor& self, const IntArray& dims, bool keep_dim, Out out),
              {.cost = elements<8>, .rules = rules_of_log_sum_exp()}) {
  store(out, at::logsumexp(self, dims, keep_dim));
}

// --- extremes -----------------------------------------------------------------------------------

static Rules rules_of_max() {
  return {"DTYPE_SUPPORT_GE910B_LIST in aclnn_{max,min}.cpp",
          {{"self, out", dtype(kRealAndBool), kOnBigChips}}};
}
VNPU_OPERATOR(Max, (const Tensor& self, Out out), {.cost = elements<2>, .rules = rules_of_max()}) {
  store(out, at::max(self));
}
VNPU_OPERATOR(Min, (const Tensor& self, Out out), {.cost = elements<2>, .rules = rules_of_max()}) {
  store(out, at::min(self));
}
static Check is_dimension_of_self() {
  return fits("be a dimension of self", {"self"}, [](const RuleArguments& own) {
    const int64_t dims = std::max<int64_t>(own.tensor(1).dims, 1);
    return own.integer() >= -dims && own.integer() < dims;
  });
}
static Rules rules_of_max_dim() {
  return {"aclnn_max_dim.cpp: DTYPE_SUPPORT_GE910B_LIST, CheckDtypeValid, CheckDim",
          {{"self", dtype(with(kFloats, {at::kLong, at::kBool})), kOnBigChips},
           {"dim", is_dimension_of_self()},
           {"out", same_dtype("self")},
           {"indices", same_sizes("out")}}};
}
VNPU_OPERATOR(MaxDim, (const Tensor& self, int64_t dim, bool keep_dim, Out out, Out indices),
              {.cost = elements<2>, .rules = rules_of_max_dim()}) {
  store_pair(out, indices, at::max(self, dim, keep_dim));
}
VNPU_OPERATOR(MinDim, (const Tensor& self, int64_t dim, bool keep_dim, Out out, Out indices),
              {.cost = elements<2>}) {
  store_pair(out, indices, at::min(self, dim, keep_dim));
}
VNPU_OPERATOR(Amax, (const Tensor& self, const IntArray& dims, bool keep_dim, Out out),
              {.cost = elements<2>,
               .rules = {
                   "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_amax.cpp",
                   {{"self", dtype(kRealAndBool), kOnBigChips}, {"out", same_dtype("self")}}}}) {
  at::amax_out(out.tensor, self, dims, keep_dim);
}
VNPU_OPERATOR(Amin, (const Tensor& self, const IntArray& dims, bool keep_dim, Out out),
              {.cost = elements<2>}) {
  at::amin_out(out.tensor, self, dims, keep_dim);
}
VNPU_OPERATOR(Aminmax, (const Tensor& self, const IntArray& dims, bool keep_dim, Out min, Out max),
              {.cost = elements<2>}) {
  store(min, at::amin(self, dims, keep_dim));
  store(max, at::amax(self, dims, keep_dim));
}
VNPU_OPERATOR(AminmaxDim, (const Tensor& self, int64_t dim, bool keep_dim, Out min, Out max),
              {.cost = elements<2>}) {
  store_pair(min, max, at::aminmax(self, dim, keep_dim));
}
VNPU_OPERATOR(AminmaxAll, (const Tensor& self, Out min, Out max), {.cost = elements<2>}) {
  store_pair(min, max, at::aminmax(self));
}

static Rules rules_of_arg_max() {
  return {"ops-math math/arg_max_v2/docs/aclnnArgMax.md, parameters",
          {{"self", dtype(kReal), kOnBigChips},
           {"dim", is_dimension_of_self()},
           {"out", dtype({at::kInt, at::kLong})}}};
}
// The first of equal extremes; torch_npu flattens the input itself when no dim is given.
VNPU_OPERATOR(ArgMax, (const Tensor& self, int64_t dim, bool keep_dim, Out out),
              {.cost = elements<2>, .rules = rules_of_arg_max()}) {
  if (argmax_of_rows(self, dim, out.tensor)) return;
  store(out, at::argmax(self, dim, keep_dim));  // out may be int32
}
VNPU_OPERATOR(ArgMin, (const Tensor& self, int64_t dim, bool keep_dim, Out out),
              {.cost = elements<2>}) {
  store(out, at::argmin(self, dim, keep_dim));
}

// --- logic --------------------------------------------------------------------------------------

static Rules rules_of_any() {
  return {"aclnn_{any,all}.cpp: dtype lists for 910B, out_dtype_support_list",
          {{"self",
            dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kInt, at::kLong,
                   at::kShort, at::kChar, at::kByte, at::kBool}),
            kOnBigChips},
           {"out", dtype({at::kByte, at::kBool})}}};
}
VNPU_OPERATOR(All, (const Tensor& self, const IntArray& dims, bool keep_dim, Out out),
              {.cost = elements<2>, .rules = rules_of_any()}) {
  store(out, at::all(self, all_if_empty(dims), keep_dim));
}
VNPU_OPERATOR(Any, (const Tensor& self, const IntArray& dims, bool keep_dim, Out out),
              {.cost = elements<2>, .rules = rules_of_any()}) {
  store(out, at::any(self, all_if_empty(dims), keep_dim));
}

// --- scans --------------------------------------------------------------------------------------

VNPU_OPERATOR(Cumsum, (const Tensor& self, int64_t dim, DType dtype, Out out),
              {.cost = elements<2>,
               .rules = {
                   "aclnn_cumsum.cpp: ASCEND910B_DTYPE_SUPPORT_LIST, CheckShape",
                   {{"out", dtype(kRealAndComplex), kOnBigChips}, {"out", same_sizes("self")}}}}) {
  at::cumsum_out(out.tensor, self, dim, dtype.type);
}
VNPU_OPERATOR(Cumprod, (const Tensor& input, const Scalar& dim, DType dtype, Out out),
              {.cost = elements<2>,
               .rules = {"DTYPE_SUPPORT_LIST, CheckShape in aclnn_cumprod.cpp",
                         {{"input", dtype(with(kReal, {at::kUInt16, at::kUInt32, at::kUInt64})),
                           kOnBigChips},
                          {"dim", dtype({at::kInt, at::kLong})},
                          {"out", same_sizes("input")}}}}) {
  at::cumprod_out(out.tensor, input, dim.toLong(), dtype.type);
}
VNPU_OPERATOR(Cummax, (const Tensor& self, int64_t dim, Out values, Out indices),
              {.cost = elements<2>}) {
  store_pair(values, indices, at::cummax(self, dim));
}
VNPU_OPERATOR(Cummin, (const Tensor& self, int64_t dim, Out values, Out indices),
              {.cost = elements<2>}) {
  store_pair(values, indices, at::cummin(self, dim));
}

// --- statistics ---------------------------------------------------------------------------------

// `correction` is subtracted from the number of elements.
VNPU_OPERATOR(VarCorrection,
              (const Tensor& self, const IntArray& dims, int64_t correction, bool keep_dim,
               Out out),
              {.cost = elements<2>}) {
  store(out, at::var(self, all_if_empty(dims), Scalar(correction), keep_dim));
}
VNPU_OPERATOR(VarMean,
              (const Tensor& self, const IntArray& dims, int64_t correction, bool keep_dim, Out var,
               Out mean),
              {.cost = elements<2>}) {
  store_pair(var, mean, at::var_mean(self, all_if_empty(dims), Scalar(correction), keep_dim));
}
VNPU_OPERATOR(Std,
              (const Tensor& self, const IntArray& dims, int64_t correction, bool keep_dim,
               Out out),
              {.cost = elements<2>}) {
  store(out, at::std(self, all_if_empty(dims), Scalar(correction), keep_dim));
}
VNPU_OPERATOR(StdMeanCorrection,
              (const Tensor& self, const IntArray& dims, int64_t correction, bool keep_dim, Out std,
               Out mean),
              {.cost = elements<2>}) {
  store_pair(std, mean, at::std_mean(self, all_if_empty(dims), Scalar(correction), keep_dim));
}
VNPU_OPERATOR(Norm,
              (const Tensor& self, const Scalar& p, const IntArray& dims, bool keep_dim, Out out),
              {.cost = elements<8>}) {
  store(out, at::norm(self, p, dims, keep_dim));
}
VNPU_OPERATOR(LinalgVectorNorm,
              (const Tensor& self, const Scalar& ord, const IntArray& dims, bool keep_dims,
               DType dtype, Out out),
              {.cost = elements<8>,
               .rules = {"aclnnLinalgVectorNorm.md, parameters",
                         {{"self, out", dtype(kFloats), kOnBigChips}}}}) {
  store(out, at::linalg_vector_norm(self, ord, all_if_empty(dims), keep_dims, dtype.type));
}
// The lower of the two middle elements.
VNPU_OPERATOR(Median, (const Tensor& self, Out out), {.cost = elements_on_ai_cpu<4>}) {
  store(out, at::median(self));
}
VNPU_OPERATOR(MedianDim, (const Tensor& self, int64_t dim, bool keep_dim, Out values, Out indices),
              {.tier = kOther, .cost = elements_on_ai_cpu<4>}) {
  // ATen 2.13's kernel reads beyond an expanded input (stride 0).
  store_pair(values, indices, at::median(self.contiguous(), dim, keep_dim));
}
// The device also takes integers, which ATen's kernel does not.
VNPU_OPERATOR(Histc,
              (const Tensor& self, int64_t bins, const Scalar& min, const Scalar& max, Out out),
              {.cost = elements_on_ai_cpu<4>}) {
  const Tensor input = at::isFloatingType(self.scalar_type()) ? self : self.to(at::kDouble);
  store(out, at::histc(input, bins, min, max));
}
VNPU_OPERATOR(Bincount,
              (const Tensor& self, const OptionalTensor& weights, int64_t minlength, Out out),
              {.cost = elements_on_ai_cpu<4>}) {
  store(out, at::bincount(self, weights, minlength));
}

}  // namespace vnpu::ops
