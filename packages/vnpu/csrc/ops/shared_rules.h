#pragma once

// Lists of dtypes, rules and conditions that documents of several operators share.

#include <initializer_list>
#include <vector>

#include "ops/rules.h"

namespace vnpu::ops {

inline std::vector<ScalarType> with(std::vector<ScalarType> dtypes,
                                    std::initializer_list<ScalarType> more) {
  dtypes.insert(dtypes.end(), more);
  return dtypes;
}

inline const std::vector<ScalarType> kHalves{at::kHalf, at::kBFloat16};
inline const std::vector<ScalarType> kFloats{at::kFloat, at::kHalf, at::kBFloat16};
inline const std::vector<ScalarType> kReal =
    with(kFloats, {at::kDouble, at::kInt, at::kLong, at::kShort, at::kChar, at::kByte});
inline const std::vector<ScalarType> kRealAndBool = with(kReal, {at::kBool});
inline const std::vector<ScalarType> kRealAndComplex =
    with(kReal, {at::kComplexFloat, at::kComplexDouble});
inline const std::vector<ScalarType> kNumbers =
    with(kRealAndBool, {at::kComplexFloat, at::kComplexDouble});

inline const std::vector<ScalarType> kAnyReal =
    with(kRealAndBool, {at::kUInt16, at::kUInt32, at::kUInt64});
inline const std::vector<ScalarType> kIndices{at::kInt, at::kLong};

inline constexpr int32_t kFractal = 29;  // ACL_FORMAT_FRACTAL_NZ
inline constexpr int64_t kMostInner = 65535;

inline Check trailing_dimensions_of(const char* other) {
  return fits(std::string("have the trailing sizes of ") + other, {other},
              [](const RuleArguments& own) {
                const TensorView& gamma = own.tensor();
                const TensorView& x = own.tensor(1);
                bool same = gamma.dims <= x.dims;
                for (int i = 1; same && i <= gamma.dims; ++i) {
                  same = size_of(gamma, -i) == size_of(x, -i);
                }
                return same;
              });
}
inline Check entry_for_each_row_of_x() {
  return fits("have an entry for each row of x", {"x"}, [](const RuleArguments& own) {
    const TensorView& x = own.tensor(1);
    const int64_t rows = size_of(x, -1) == 0 ? 0 : x.numel() / size_of(x, -1);
    return own.tensor().numel() == rows;
  });
}
// 8-bit rows beside 4-bit weights, which lie in int32.
inline bool has_halves(const RuleArguments& own) {
  return own.has(0) && own.has(1) && own.tensor(0).dtype == at::kChar &&
         own.tensor(1).dtype == at::kInt;
}

// Sums, differences, products and quotients of two tensors, and of a tensor and a number.
inline constexpr char kArithmetic[] =
    "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_{add,sub,mul,div}.cpp";
inline Rules rules_of_add() {
  return {kArithmetic, {{"self, other", dtype(kNumbers), kOnBigChips}}};
}
inline Rules rules_of_divs() { return {kArithmetic, {{"self", dtype(kNumbers), kOnBigChips}}}; }

}  // namespace vnpu::ops
