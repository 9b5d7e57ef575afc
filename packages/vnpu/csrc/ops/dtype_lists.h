#pragma once

// Lists of dtypes that documents of several operators name.

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

}  // namespace vnpu::ops
