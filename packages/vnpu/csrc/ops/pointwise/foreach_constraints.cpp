// What operations on lists of tensors can be called with.
// Sources: docs and sources of ops-nn v8.5.0, foreach. Where a document is narrower than the
// operator's own check, the check decides: int32 of PowScalarV2 and RoundOffNumberV2, tensors that
// are not contiguous or empty. Lists of numbers have no rows for their dtype: documents ask for
// float32, torch_npu brings float64, and the library converts.

#include "ops/dtype_lists.h"
#include "ops/pointwise/declarations.h"

namespace vnpu::ops {
namespace {

constexpr Workspace kSmall{.bytes = 32};  // WORK_SPACE_SIZE in foreach_tiling_func.cpp
constexpr char kUnary[] = "ops-nn foreach/foreach_*/docs/aclnnForeach*.md of one list, parameters";
constexpr char kCopy[] = "ops-nn foreach/foreach_copy/docs/aclnnForeachCopy.md, parameters";
constexpr char kZero[] =
    "ops-nn foreach/foreach_zero_inplace/docs/aclnnForeachZeroInplace.md, parameters";
constexpr char kRound[] = "CheckDtypeValid in aclnn_foreach_round_off_number_v2.cpp";
constexpr char kRoundMode[] =
    "ops-nn foreach/foreach_round_off_number/docs/aclnnForeachRoundOffNumberV2.md, parameters";
constexpr char kNorm[] = "ops-nn foreach/foreach_norm/docs/aclnnForeachNorm.md, parameters";
constexpr char kNormKernel[] =
    "modelCode in ops-nn foreach/foreach_norm/op_kernel/foreach_norm.cpp";
constexpr char kNumber[] = "CheckDtypeValid in aclnn_foreach_*_scalar_v2.cpp";
constexpr char kOfNumbers[] =
    "ops-nn foreach/foreach_*_scalar_list/docs/aclnnForeach*.md, parameters";
constexpr char kPair[] = "ops-nn foreach/foreach_*_list/docs/aclnnForeach*List.md, parameters";
constexpr char kSum[] = "ForeachAddListV2CheckDtypeValid in aclnn_foreach_add_list_v2.cpp";
constexpr char kLerp[] = "ops-nn foreach/foreach_lerp_*/docs/aclnnForeachLerp*.md, parameters";
constexpr char kTerm[] = "CheckDtypeValid in aclnn_foreach_addc*_scalar_v2.cpp";
constexpr char kTermNumbers[] =
    "ops-nn foreach/foreach_addc*_scalar_list/docs/aclnnForeachAddc*ScalarList.md, parameters";

const std::vector<ScalarType> kNumbersToo{at::kFloat, at::kHalf, at::kBFloat16, at::kInt};

Check of_one_dtype(const char* list) {
  Check check = same_dtype(list);
  check.text = "have one dtype in all tensors";
  return check;
}

// `out`, or a further operand, beside the first list.
void add_like(std::vector<Row>& rows, const char* argument, const char* first, const char* source) {
  rows.push_back({argument, same_count(first), source});
  rows.push_back({argument, same_dtype(first), source});
  rows.push_back({argument, same_sizes_each(first), source});
}

std::vector<Row> list_rows(const char* first, const std::vector<ScalarType>& dtypes,
                           std::initializer_list<const char*> others, const char* source) {
  std::vector<Row> rows{{first, dtype(dtypes), source}, {first, of_one_dtype(first), source}};
  for (const char* const other : others) add_like(rows, other, first, source);
  return rows;
}

// A number beside a list of floats, or of int32.
void add_number(std::vector<Row>& rows, const char* number, const char* list, const char* source) {
  rows.push_back(
      {number, dtype({at::kFloat, at::kDouble}).when(has_dtype(list, {at::kFloat, at::kBFloat16})),
       source});
  rows.push_back(
      {number, dtype({at::kHalf, at::kDouble}).when(has_dtype(list, {at::kHalf})), source});
}
void add_integer(std::vector<Row>& rows, const char* number, const char* list, const char* source) {
  rows.push_back({number, dtype({at::kInt, at::kLong}).when(has_dtype(list, {at::kInt})), source});
}

}  // namespace

Allowed allowed_foreach_abs() {
  return {kSmall, list_rows("x", kFloats, {"out"}, kUnary), kBigChips};
}

Allowed allowed_foreach_neg() {
  return {kSmall, list_rows("x", kNumbersToo, {"out"}, kUnary), kBigChips};
}

Allowed allowed_foreach_sign() {
  return {kSmall,
          list_rows("x", {at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kInt, at::kLong},
                    {"out"}, kUnary),
          kBigChips};
}

Allowed allowed_foreach_copy() {
  return {kSmall,
          {{"x",
            dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort,
                   at::kUInt16, at::kInt, at::kUInt32, at::kLong, at::kDouble, at::kBool}),
            kCopy},
           {"out", same_count("x"), kCopy},
           {"out", same_sizes_each("x"), kCopy}},
          kBigChips};
}

Allowed allowed_foreach_zero_inplace() {
  return {kSmall,
          {{"x", dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kShort, at::kInt}), kZero}},
          kBigChips};
}

Allowed allowed_foreach_round_off_number_v2() {
  std::vector<Row> rows = list_rows("x", kNumbersToo, {"out"}, kRound);
  rows.push_back({"roundMode", dtype({at::kChar, at::kLong}), kRoundMode});
  return {kSmall, std::move(rows), kBigChips};
}

Allowed allowed_foreach_norm() {
  return {{.bytes = 16 * kMiB},
          {{"x", dtype(kFloats), kNorm},
           {"x", of_one_dtype("x"), kNorm},
           {"out", same_count("x"), kNorm},
           {"out", same_dtype("x"), kNorm},
           {"scalar", dtype({at::kFloat, at::kDouble, at::kLong}), kNorm},
           {"scalar",
            that("be 1 or 2", {},
                 [](const RuleArguments& own) -> Found {
                   const double order = own.scalar().value.toDouble();
                   if (order == 1 || order == 2) return std::nullopt;
                   return "value " + std::to_string(order);
                 }),
            kNormKernel}},
          kBigChips};
}

namespace {

std::vector<Row> number_rows(const std::vector<ScalarType>& dtypes, bool has_integers) {
  std::vector<Row> rows = list_rows("x", dtypes, {"out"}, kNumber);
  add_number(rows, "scalar", "x", kNumber);
  if (has_integers) add_integer(rows, "scalar", "x", kNumber);
  return rows;
}

std::vector<Row> numbers_rows(const std::vector<ScalarType>& dtypes) {
  std::vector<Row> rows = list_rows("x", dtypes, {"out"}, kOfNumbers);
  rows.push_back({"scalars", same_count("x"), kOfNumbers});
  return rows;
}

}  // namespace

Allowed allowed_foreach_add_scalar_v2() {
  return {kSmall, number_rows(kNumbersToo, true), kBigChips};
}

Allowed allowed_foreach_div_scalar_v2() { return {kSmall, number_rows(kFloats, false), kBigChips}; }

Allowed allowed_foreach_add_scalar_list() { return {kSmall, numbers_rows(kNumbersToo), kBigChips}; }

Allowed allowed_foreach_div_scalar_list() { return {kSmall, numbers_rows(kFloats), kBigChips}; }

Allowed allowed_foreach_pow_scalar_and_tensor() {
  return {kSmall, list_rows("x", kNumbersToo, {"out"}, kOfNumbers), kBigChips};
}

Allowed allowed_foreach_mul_list() {
  return {kSmall, list_rows("x1", kNumbersToo, {"x2", "out"}, kPair), kBigChips};
}

Allowed allowed_foreach_div_list() {
  return {kSmall, list_rows("x1", kFloats, {"x2", "out"}, kPair), kBigChips};
}

Allowed allowed_foreach_lerp_list() {
  return {kSmall, list_rows("x1", kFloats, {"x2", "weight", "out"}, kLerp), kBigChips};
}

Allowed allowed_foreach_lerp_scalar() {
  return {kSmall, list_rows("x1", kFloats, {"x2", "out"}, kLerp), kBigChips};
}

Allowed allowed_foreach_add_list_v2() {
  std::vector<Row> rows = list_rows("x1", kNumbersToo, {"x2", "out"}, kSum);
  add_number(rows, "alpha", "x1", kSum);
  add_integer(rows, "alpha", "x1", kSum);
  return {kSmall, std::move(rows), kBigChips};
}

namespace {

std::vector<Row> term_rows(const std::vector<ScalarType>& dtypes, bool has_integers) {
  std::vector<Row> rows = list_rows("x1", dtypes, {"x2", "x3", "out"}, kTerm);
  add_number(rows, "scalar", "x1", kTerm);
  if (has_integers) add_integer(rows, "scalar", "x1", kTerm);
  return rows;
}

std::vector<Row> term_numbers_rows(const std::vector<ScalarType>& dtypes) {
  std::vector<Row> rows = list_rows("x1", dtypes, {"x2", "x3", "out"}, kTermNumbers);
  rows.push_back({"scalars", same_dtype("x1"), kTermNumbers});
  rows.push_back({"scalars",
                  fits("have one number for each tensor of x1", {"x1"},
                       [](const RuleArguments& own) -> Found {
                         const int64_t numbers = own.tensor().numel();
                         if (numbers == own.count(1)) return std::nullopt;
                         return std::to_string(numbers) + " beside " +
                                std::to_string(own.count(1)) + " tensors";
                       }),
                  kTermNumbers});
  return rows;
}

}  // namespace

Allowed allowed_foreach_addcmul_scalar_v2() {
  return {kSmall, term_rows(kNumbersToo, true), kBigChips};
}

Allowed allowed_foreach_addcdiv_scalar_v2() {
  return {kSmall, term_rows(kFloats, false), kBigChips};
}

Allowed allowed_foreach_addcmul_scalar_list() {
  return {kSmall, term_numbers_rows(kNumbersToo), kBigChips};
}

Allowed allowed_foreach_addcdiv_scalar_list() {
  return {kSmall, term_numbers_rows(kFloats), kBigChips};
}

}  // namespace vnpu::ops
