#pragma once

// The types of an operator's arguments, as its row states them and as its body gets them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/tensor_view.h"

struct aclTensor;

namespace vnpu::ops {

using at::Scalar;
using at::ScalarType;
using at::Tensor;

//   const Tensor&                    aclTensor*, read, required
//   const OptionalTensor&            aclTensor*, read, may be null
//   Out                              aclTensor*, written, required
//   OptionalOut                      aclTensor*, written, may be null
//   InOut                            aclTensor*, read and written, required
//   OptionalInOut                    aclTensor*, read and written, may be null
//   WholeOut                         aclTensor*, written, required; also says where it lies
//   DynamicOut                       aclTensor*, written, its shape is decided by the operator
//   const TensorList&, const OptionalTensorList&   aclTensorList*, read (null = empty)
//   const OutList&, const OptionalOutList&         aclTensorList*, written (null = empty)
//   const InOutList&                 aclTensorList*, read and written
//   const Scalar&                    aclScalar*, required
//   const OptionalScalar&            aclScalar*, may be null
//   const IntArray&                  aclIntArray*, null = empty
//   const OptionalIntArray&          aclIntArray*, null = nullopt
//   const BoolArray&                 null = empty
//   DType                            aclDataType by value
//   const Text&                      char*, null = ""
//   bool, int8_t, int32_t, int64_t, uint64_t, float, double   by value

using OptionalTensor = std::optional<Tensor>;
struct Out {
  Tensor tensor;
};
struct InOut {
  Tensor tensor;
};
struct WholeOut {
  Tensor tensor;
  TensorView view;
};
struct OptionalOut {
  std::optional<Tensor> tensor;
  explicit operator bool() const { return tensor.has_value(); }
};
struct OptionalInOut {
  std::optional<Tensor> tensor;
  explicit operator bool() const { return tensor.has_value(); }
};
struct DynamicOut {
  Tensor tensor;  // with the sizes that the caller allocated (an upper bound)
  aclTensor* handle = nullptr;
  // Writes `result` (row-major) to the front of the memory and reports its sizes to the caller.
  void set(const Tensor& result) const;
};
struct TensorList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct OptionalTensorList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct OutList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct OptionalOutList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct InOutList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
using OptionalScalar = std::optional<Scalar>;
using IntArray = std::vector<int64_t>;
using OptionalIntArray = std::optional<std::vector<int64_t>>;
struct BoolArray : std::vector<bool> {
  using std::vector<bool>::vector;
};
struct DType {
  ScalarType type;
};
using Text = std::string;

// A number with the dtype that it crossed the interface in.
struct TypedScalar {
  Scalar value;
  ScalarType dtype = at::kDouble;
};

}  // namespace vnpu::ops
