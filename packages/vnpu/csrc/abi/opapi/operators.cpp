// libopapi: functions that torch_npu, tests and documents need in addition to the operators, which
// export themselves (ops/operator.h).

#include <algorithm>

#include "device/checked_sizes.h"
#include "interface/status.h"
#include "ops/constraints.h"
#include "ops/handles.h"
#include "ops/matmul/fractal_layout.h"
#include "ops/operator.h"

using namespace vnpu;

// An operator of one phase: returns the shape that the caller has to allocate. The caller frees the
// sizes with delete[].
extern "C" __attribute__((visibility("default"))) int aclnnNpuFormatCastCalculateSizeAndFormat(
    const aclTensor* source, int format, int additional_type, int64_t** sizes, uint64_t* dims,
    int* actual_format) {
  try {
    const ops::TensorView& view = source->view;
    std::vector<int64_t> result(view.sizes, view.sizes + view.dims);
    if (format == ops::kFormatFractalNz) {
      const size_t item = at::elementSize(ops::read_dtype(additional_type));
      result = ops::fractal_sizes(result, 32 / static_cast<int64_t>(item));
    } else if (format != ops::kFormatNd) {
      throw Failure(FailureKind::kOperatorInvalid,
                    "aclnnNpuFormatCastCalculateSizeAndFormat: format " + std::to_string(format) +
                        " is not known; ND (2) and FRACTAL_NZ (29) are.");
    }
    *sizes = new int64_t[result.size()];
    std::copy(result.begin(), result.end(), *sizes);
    *dims = result.size();
    *actual_format = format;
    return 0;
  } catch (...) {
    return abi::report_exception("aclnnNpuFormatCastCalculateSizeAndFormat");
  }
}

// Likewise for a weight [batch.., n, k] in FRACTAL_NZ: the number of elements, with tiles of 32
// columns, or of 16 if elements have 16 bits.
extern "C" __attribute__((visibility("default"))) int aclnnCalculateMatmulWeightSizeV2(
    const aclIntArray* sizes, int type, uint64_t* elements) {
  constexpr const char* kName = "aclnnCalculateMatmulWeightSizeV2";
  constexpr int kHalf = 1;
  constexpr int kBFloat16 = 27;  // aclDataType
  try {
    if (sizes == nullptr || elements == nullptr) {
      throw Failure(FailureKind::kOperatorInvalid, std::string(kName) + ": a null pointer.");
    }
    const std::vector<int64_t>& shape = sizes->values;
    if (shape.size() < 2 || shape.size() > 6 ||
        std::find(shape.begin(), shape.end(), 0) != shape.end()) {
      throw Failure(FailureKind::kOperatorInvalid,
                    std::string(kName) + ": a weight has 2 to 6 dimensions, none of them empty.");
    }
    *elements = 1;
    for (const int64_t size :
         ops::fractal_sizes(shape, type == kHalf || type == kBFloat16 ? 16 : 32))
      *elements = checked_multiply(*elements, static_cast<uint64_t>(size), "a weight's elements",
                                   FailureKind::kOperatorInvalid);
    return 0;
  } catch (...) {
    return abi::report_exception(kName);
  }
}

// Not part of CANN: the rows of ops/constraints.h, for tests and documents. The text lives as long
// as the process.
extern "C" __attribute__((visibility("default"))) const char* vnpuListConstraints() {
  static const std::string all = ops::listed_constraints();
  return all.c_str();
}

// Likewise: the operators of ops/declaration.h.
extern "C" __attribute__((visibility("default"))) const char* vnpuListOperators() {
  static const std::string all = ops::listed_operators();
  return all.c_str();
}

// Likewise: the tier of an operator, by its name without "aclnn"; null where there is none.
extern "C" __attribute__((visibility("default"))) const char* vnpuTierOf(const char* type) {
  const ops::Operator* const found = ops::operator_named(std::string("aclnn") + type);
  return found == nullptr ? nullptr : ops::text_of(found->declared().tier);
}
