// Costs of reductions and norms.

#include "ops/costs.h"

namespace vnpu::ops {
namespace {

using timing::Work;

const bool norms = price(
    "cost: AddLayerNorm AddRmsNorm AddRmsNormQuant AddRmsNormQuantV2 BatchNorm FastLayerNorm"
    " GemmaRmsNorm GroupNorm InplaceAddRmsNorm LayerNorm LinalgVectorNorm LogSoftmax LogSumExp"
    " Norm RmsNorm RmsNormQuant Softmax",
    [](const Call& call, Work& work) { for_each_element(call, work, 8); });

const bool sums = price(
    "cost: All Amax Amin Aminmax AminmaxAll AminmaxDim Any ArgMax ArgMin Cummax Cummin"
    " Cumprod Cumsum Max MaxDim Mean Min MinDim Prod ProdDim ReduceNansum ReduceSum Std"
    " StdMeanCorrection Trace VarCorrection VarMean",
    [](const Call& call, Work& work) { for_each_element(call, work, 2); });

// Not on vector cores.
const bool on_ai_cpu = price("cost: Bincount Histc Median MedianDim NanMedian NanMedianDim",
                             [](const Call& call, Work& work) {
                               for_each_element(call, work, 4);
                               work.kind = Work::Class::kAiCpu;
                             });

}  // namespace
}  // namespace vnpu::ops
