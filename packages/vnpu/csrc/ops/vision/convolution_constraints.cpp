// What convolutions and pools can be called with.
// Source: docs of ops-nn v8.5.0 (conv).

#include "ops/dtype_lists.h"
#include "ops/vision/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kConvolution[] =
    "ops-nn conv/convolution_forward/docs/aclnnConvolution.md, parameters";

constexpr char kPool[] = "DIM_NUM_3D, DIM_NUM_4D in aclnn_avgpool2d.cpp";

Check one_for_each_dimension() {
  return fits("have a number for each dimension of input but two", {"input"},
              [](const RuleArguments& own) -> Found {
                const auto numbers = static_cast<int64_t>(own.integers().size());
                if (numbers == own.tensor(1).dims - 2) return std::nullopt;
                return std::to_string(numbers) + " numbers beside sizes " + sizes_of(own.tensor(1));
              });
}

}  // namespace

Allowed allowed_avg_pool2d() { return {{}, {{"self", dims(3, 4), kPool}}}; }

Allowed allowed_convolution() {
  return {{},
          {{"input", dtype(kFloats), kConvolution, kOnBigChips},
           {"weight", dtype(kFloats), kConvolution, kOnBigChips},
           {"bias", dtype(kFloats), kConvolution, kOnBigChips},
           {"input", dims(3, 5), kConvolution},
           {"weight", dims(3, 5), kConvolution},
           {"stride", one_for_each_dimension(), kConvolution},
           {"dilation", one_for_each_dimension(), kConvolution},
           {"groups", between(1, 65535), kConvolution}}};
}

}  // namespace vnpu::ops
