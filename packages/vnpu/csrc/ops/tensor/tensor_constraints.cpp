// What operators that make, move and choose elements can be called with.
// Sources: the dtype lists for Ascend910B in aclnn_*.cpp of ops-math and ops-nn v8.5.0, which the
// documents repeat. They say nothing of 310P here.

#include <limits>

#include "ops/dtype_lists.h"
#include "ops/tensor/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kFill[] = "DTYPE_SUPPORT_GE910B_LIST in aclnn_fill_scalar.cpp";
constexpr char kZero[] = "DTYPE_SUPPORT_LIST in aclnn_zero.cpp";
constexpr char kOne[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_ones.cpp";
constexpr char kCast[] = "OP_CHECK_SHAPE_NOT_EQUAL in aclnn_cast.cpp";
constexpr char kCopy[] = "aclnn_copy.cpp: DTYPE_SUPPORT_LIST, CheckShape";
constexpr char kStack[] = "ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST in aclnn_stack.cpp";
constexpr char kInterleave[] =
    "aclnn_repeat_interleave.cpp: dtype list for 910B, CheckIntRepeatsRange";
constexpr char kPad[] = "DTYPE_SUPPORT_910B_LIST in aclnn_constant_pad_nd.cpp";
constexpr char kEye[] = "aclnn_eye.cpp: DTYPE_SUPPORT_LIST_A2, CheckShape";
constexpr char kLinspace[] = "dtype lists in aclnn_linspace.cpp";
constexpr char kIndexAdd[] = "aclnnIndexAdd.md, parameters and status codes";
constexpr char kIndexPut[] = "CheckDtypeValid in aclnn_index_put_impl.cpp";
constexpr char kIndexCopy[] = "aclnn_index_copy.cpp: CheckDtypeValid, CheckShape, CheckElementNum";
constexpr char kIndexFill[] = "aclnn_index_fill.cpp: DTYPE_910B_SUPPORT_LIST, CheckIndexDtypeValid";
constexpr char kCat[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_cat.cpp";
constexpr char kArange[] = "ASCEND910B_OUTPUT_DTYPE_SUPPORT_LIST in aclnn_arange.cpp";
constexpr char kRepeat[] = "OP_CHECK_DTYPE_NOT_SAME in aclnn_repeat.cpp";
constexpr char kTriu[] = "aclnn_triu.cpp: DTYPE_SUPPORT_LIST_910B, OP_CHECK_SHAPE_NOT_EQUAL";
constexpr char kIndex[] = "CheckDtypeValid in aclnn_index.cpp";
constexpr char kNonzero[] = "CheckDtypeValid in aclnn_nonzero.cpp";
constexpr char kNonzeroV2[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_nonzero_v2.cpp";
constexpr char kFlip[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_flip.cpp";
constexpr char kSelect[] = "CheckDtypeValid in aclnn_index_select.cpp";
constexpr char kGather[] = "CheckDtypeValid, CheckShape in aclnn_gather.cpp";
constexpr char kScatter[] = "CheckDtypeValid in aclnn_scatter.cpp";
constexpr char kSort[] = "CheckDtypeValid, CheckShape in aclnn_sort.cpp";
constexpr char kTopk[] = "CheckDtypeValid in aclnn_topk.cpp";

const std::vector<ScalarType> kAnyReal =
    with(kRealAndBool, {at::kUInt16, at::kUInt32, at::kUInt64});
const std::vector<ScalarType> kIndices{at::kInt, at::kLong};
const std::vector<ScalarType> kAnyNumbers = with(kNumbers, {at::kUInt16, at::kUInt32, at::kUInt64});

}  // namespace

Allowed allowed_inplace_fill_scalar() {
  return {{}, {{"self", dtype(kNumbers), kFill, kOnBigChips}}};
}

Allowed allowed_inplace_zero() {
  return {{}, {{"self", dtype(with(kNumbers, {at::kUInt16})), kZero, kOnBigChips}}};
}

Allowed allowed_inplace_one() { return {{}, {{"self", dtype(kRealAndBool), kOne, kOnBigChips}}}; }

Allowed allowed_arange() {
  return {{},
          {{"out", dtype({at::kHalf, at::kFloat, at::kDouble, at::kLong, at::kInt, at::kBFloat16}),
            kArange, kOnBigChips}}};
}

Allowed allowed_cast() { return {{}, {{"out", same_sizes("self"), kCast}}}; }

Allowed allowed_inplace_copy() {
  return {{},
          {{"self", dtype(kAnyNumbers), kCopy, kOnBigChips},
           {"src", dtype(kAnyNumbers), kCopy, kOnBigChips},
           {"src", dims(0, 8), kCopy}}};
}

Allowed allowed_stack() {
  return {{},
          {{"tensors", dtype(kAnyNumbers), kStack, kOnBigChips},
           {"out", dtype(kAnyNumbers), kStack, kOnBigChips}}};
}

Allowed allowed_repeat_interleave_int() {
  return {
      {},
      {{"self",
        dtype(with(kFloats, {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool})),
        kInterleave, kOnBigChips},
       {"repeats", between(0, std::numeric_limits<int64_t>::max()), kInterleave},
       {"out", same_dtype("self"), kInterleave}}};
}

Allowed allowed_repeat_interleave() {
  return {
      {},
      {{"self",
        dtype(with(kFloats, {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool})),
        kInterleave, kOnBigChips},
       {"repeats", dtype(kIndices), kInterleave},
       {"out", same_dtype("self"), kInterleave}}};
}

Allowed allowed_flip() { return {{}, {{"self", dtype(kNumbers), kFlip, kOnBigChips}}}; }

Allowed allowed_constant_pad_nd() {
  return {{}, {{"self", dtype(kAnyNumbers), kPad, kOnBigChips}, {"out", same_dtype("self"), kPad}}};
}

Allowed allowed_linspace() { return {{}, {{"out", dtype(kReal), kLinspace, kOnBigChips}}}; }

Allowed allowed_eye() {
  return {
      {},
      {{"out",
        dtype(with(kFloats, {at::kInt, at::kChar, at::kShort, at::kByte, at::kLong, at::kBool})),
        kEye, kOnBigChips},
       {"out", dims(2, 2), kEye}}};
}

Allowed allowed_cat() {
  return {{}, {{"out", dtype(with(kRealAndBool, {at::kComplexFloat})), kCat, kOnBigChips}}};
}

Allowed allowed_repeat() { return {{}, {{"out", same_dtype("self"), kRepeat}}}; }

Allowed allowed_triu() {
  return {{},
          {{"self", dtype(kAnyReal), kTriu, kOnBigChips},
           {"self", dims(2, 8), kTriu},
           {"out", same_dtype("self"), kTriu},
           {"out", same_sizes("self"), kTriu}}};
}

namespace {

// A dimension that is not indexed has an index of no elements, whose dtype does not matter.
Check indices_that_are_given(std::vector<ScalarType> allowed) {
  Check check = dtype(std::move(allowed));
  check.find = [find = std::move(check.find)](const RuleArguments& own) -> Found {
    const ViewSpan& all = own[0].tensors;
    for (size_t i = 0; i < all.count; ++i) {
      if (all[i].numel() == 0) continue;
      const ArgumentValue one{.kind = ArgumentValue::Kind::kTensor, .tensor = &all[i]};
      const int first = 0;
      if (Found found = find(RuleArguments(&one, &first))) return found;
    }
    return std::nullopt;
  };
  check.form.clear();  // dtypes of empty ones do not count
  return check;
}

}  // namespace

Allowed allowed_index() {
  return {{},
          {{"self", dtype(kRealAndBool), kIndex, kOnBigChips},
           {"indices", indices_that_are_given({at::kInt, at::kLong, at::kBool}), kIndex},
           {"out", same_dtype("self"), kIndex}}};
}

Allowed allowed_index_put_impl() {
  return {{},
          {{"self", dtype(kRealAndBool), kIndexPut, kOnBigChips},
           {"indices", indices_that_are_given({at::kInt, at::kLong, at::kBool}), kIndexPut},
           {"values", same_dtype("self"), kIndexPut}}};
}

Allowed allowed_index_add() {
  return {{},
          {{"self", dtype(kRealAndBool), kIndexAdd, kOnBigChips},
           {"index", dtype(kIndices), kIndexAdd},
           {"index", dims(0, 1), kIndexAdd},
           {"source", same_dtype("self"), kIndexAdd},
           {"out", same_dtype("self"), kIndexAdd},
           {"out", same_sizes("self"), kIndexAdd}}};
}

Allowed allowed_inplace_index_copy() {
  return {{},
          {{"self", dtype(kNumbers), kIndexCopy, kOnBigChips},
           {"self", dims(0, 8), kIndexCopy},
           {"index", dtype(kIndices), kIndexCopy},
           {"index", dims(0, 1), kIndexCopy},
           {"source", same_dtype("self"), kIndexCopy}}};
}

Allowed allowed_inplace_index_fill() {
  return {{},
          {{"self", dtype({at::kInt, at::kHalf, at::kFloat, at::kLong, at::kBool, at::kBFloat16}),
            kIndexFill, kOnBigChips},
           {"index", dtype(kIndices), kIndexFill}}};
}

Allowed allowed_nonzero() {
  return {{},
          {{"self", dtype(kRealAndBool), kNonzero, kOnBigChips},
           {"out", dtype({at::kLong}), kNonzero}}};
}

Allowed allowed_nonzero_v2() { return {{}, {{"self", dtype(kAnyReal), kNonzeroV2, kOnBigChips}}}; }

Allowed allowed_index_select() {
  return {{}, {{"index", dtype(kIndices), kSelect}, {"out", same_dtype("self"), kSelect}}};
}

Allowed allowed_gather() {
  return {{},
          {{"self", dtype(kAnyReal), kGather, kOnBigChips},
           {"index", dtype(kIndices), kGather},
           {"out", same_dtype("self"), kGather},
           {"out", same_sizes("index"), kGather}}};
}

Allowed allowed_scatter() {
  return {{},
          {{"self", dtype(kNumbers), kScatter, kOnBigChips},
           {"index", dtype(kIndices), kScatter},
           {"src", same_dtype("self"), kScatter},
           {"out", same_dtype("self"), kScatter},
           {"out", same_sizes("self"), kScatter}}};
}

Allowed allowed_scatter_value() {
  return {{},
          {{"self", dtype(kNumbers), kScatter, kOnBigChips},
           {"index", dtype(kIndices), kScatter},
           {"out", same_dtype("self"), kScatter},
           {"out", same_sizes("self"), kScatter}}};
}

Allowed allowed_inplace_scatter() {
  return {{},
          {{"self", dtype(kNumbers), kScatter, kOnBigChips},
           {"index", dtype(kIndices), kScatter},
           {"src", same_dtype("self"), kScatter}}};
}

Allowed allowed_sort() {
  return {{},
          {{"self",
            dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt,
                   at::kLong, at::kBool}),
            kSort, kOnBigChips},
           {"values", same_sizes("self"), kSort},
           {"indices", dtype({at::kLong}), kSort},
           {"indices", same_sizes("self"), kSort}}};
}

Allowed allowed_topk() {
  return {{},
          {{"self", dtype(kReal), kTopk, kOnBigChips},
           {"values", same_dtype("self"), kTopk},
           {"indices", dtype({at::kLong}), kTopk}}};
}

}  // namespace vnpu::ops
