// Order and search: sort, top-k, distinct values, positions in sorted sequences, non-zero elements.
// Results whose length depends on the data report their sizes through DynamicOut.

#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// torch_npu's value for "no dimension" in UniqueConsecutive.
constexpr int64_t kNoDimension = 1000;

bool are(const Out& values, ScalarType type, const Out& indices) {
  return values.tensor.scalar_type() == type && indices.tensor.scalar_type() == at::kLong;
}

void store_pair(const Out& values, const Out& indices, const std::tuple<Tensor, Tensor>& result) {
  store(values, std::get<0>(result));
  store(indices, std::get<1>(result));
}

void set_when(bool wanted, const DynamicOut& out, const Tensor& result) {
  if (wanted) out.set(result);
}

}  // namespace

// Always stable, which also serves callers that do not require it.
VNPU_OPERATOR(Sort,
              (const Tensor& self, bool, int64_t dim, bool descending, Out values, Out indices),
              {.cost = elements<32>,
               .rules = {"CheckDtypeValid, CheckShape in aclnn_sort.cpp",
                         {{"self",
                           dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kByte, at::kChar,
                                  at::kShort, at::kInt, at::kLong, at::kBool}),
                           kOnBigChips},
                          {"values", same_sizes("self")},
                          {"indices", {dtype({at::kLong}), same_sizes("self")}}}}}) {
  if (are(values, self.scalar_type(), indices) && self.dim() > 0) {
    at::sort_out(values.tensor, indices.tensor, self, /*stable=*/true, dim, descending);
  } else {
    store_pair(values, indices, at::sort(self, /*stable=*/true, dim, descending));
  }
}
VNPU_OPERATOR(Topk,
              (const Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, Out values,
               Out indices),
              {.cost = elements<32>,
               .rules = {"CheckDtypeValid in aclnn_topk.cpp",
                         {{"self", dtype(kReal), kOnBigChips},
                          {"values", same_dtype("self")},
                          {"indices", dtype({at::kLong})}}}}) {
  if (are(values, self.scalar_type(), indices) && self.dim() > 0) {
    at::topk_out(values.tensor, indices.tensor, self, k, dim, largest, sorted);
  } else {
    store_pair(values, indices, at::topk(self, k, dim, largest, sorted));
  }
}
VNPU_OPERATOR(Kthvalue,
              (const Tensor& self, int64_t k, int64_t dim, bool keepdim, Out values, Out indices),
              {.cost = elements<32>}) {
  store_pair(values, indices, at::kthvalue(self, k, dim, keepdim));
}

// --- distinct values
// -------------------------------------------------------------------------------
VNPU_OPERATOR(Unique,
              (const Tensor& self, bool sorted, bool return_inverse, DynamicOut values,
               DynamicOut inverse),
              {.cost = elements_on_ai_cpu<32>}) {
  const auto [unique, positions] = at::_unique(self, sorted, return_inverse);
  values.set(unique);
  set_when(return_inverse, inverse, positions);
}
VNPU_OPERATOR(Unique2,
              (const Tensor& self, bool sorted, bool return_inverse, bool return_counts,
               DynamicOut values, DynamicOut inverse, DynamicOut counts),
              {.cost = elements_on_ai_cpu<32>}) {
  const auto [unique, positions, repeats] =
      at::_unique2(self, sorted, return_inverse, return_counts);
  values.set(unique);
  set_when(return_inverse, inverse, positions);
  set_when(return_counts, counts, repeats);
}
VNPU_OPERATOR(UniqueConsecutive,
              (const Tensor& self, bool return_inverse, bool return_counts, int64_t dim,
               DynamicOut values, DynamicOut inverse, DynamicOut counts),
              {.cost = elements_on_ai_cpu<32>}) {
  const auto [unique, positions, repeats] =
      at::unique_consecutive(self, return_inverse, return_counts,
                             dim == kNoDimension ? std::nullopt : std::optional<int64_t>(dim));
  values.set(unique);
  set_when(return_inverse, inverse, positions);
  set_when(return_counts, counts, repeats);
}

// --- positions
// -------------------------------------------------------------------------------------
VNPU_OPERATOR(SearchSorted,
              (const Tensor& sorted_sequence, const Tensor& self, bool out_int32, bool right,
               const OptionalTensor& sorter, Out out),
              {.cost = elements<1>}) {
  store(out, at::searchsorted(sorted_sequence, self, out_int32, right, std::nullopt, sorter));
}
VNPU_OPERATOR(SearchSorteds,
              (const Tensor& sorted_sequence, const Scalar& self, bool out_int32, bool right,
               const OptionalTensor& sorter, Out out),
              {.cost = elements<1>}) {
  store(out, at::searchsorted(sorted_sequence, self, out_int32, right, std::nullopt, sorter));
}
VNPU_OPERATOR(Bucketize,
              (const Tensor& self, const Tensor& boundaries, bool out_int32, bool right, Out out),
              {.cost = elements<1>}) {
  store(out, at::bucketize(self, boundaries, out_int32, right));
}
// Row-major in both forms; ATen's own result is column-major, DynamicOut::set reorders it.
VNPU_OPERATOR(Nonzero, (const Tensor& self, DynamicOut out),
              {.cost = elements<1>,
               .rules = {
                   "CheckDtypeValid in aclnn_nonzero.cpp",
                   {{"self", dtype(kRealAndBool), kOnBigChips}, {"out", dtype({at::kLong})}}}}) {
  out.set(at::nonzero(self));
}
VNPU_OPERATOR(NonzeroV2, (const Tensor& self, DynamicOut out),
              {.cost = elements<1>,
               .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_nonzero_v2.cpp",
                         {{"self", dtype(kAnyReal), kOnBigChips}}}}) {
  out.set(at::nonzero(self).t());
}
VNPU_OPERATOR(IsInTensorScalar,
              (const Tensor& element, const Scalar& test_element, bool assume_unique, bool invert,
               Out out),
              {.cost = elements<1>}) {
  store(out, at::isin(element, test_element, assume_unique, invert));
}
VNPU_OPERATOR(IsInScalarTensor,
              (const Scalar& element, const Tensor& test_elements, bool assume_unique, bool invert,
               Out out),
              {.cost = elements<1>}) {
  store(out, at::isin(element, test_elements, assume_unique, invert));
}

}  // namespace vnpu::ops
