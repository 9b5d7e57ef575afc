// Costs of quantization.

#include "ops/costs.h"

namespace vnpu::ops {
namespace {

using timing::Work;

const bool scaled = price("cost: DynamicQuant DynamicQuantV2 DynamicQuantV3 DynamicQuantV4",
                          [](const Call& call, Work& work) { for_each_element(call, work, 6); });

const bool plain = price(
    "cost: AscendAntiQuant AscendQuant AscendQuantV3 DequantBias Quantize TransQuantParamV2"
    " TransQuantParamV3",
    [](const Call& call, Work& work) { for_each_element(call, work, 3); });

}  // namespace
}  // namespace vnpu::ops
