// Costs of random numbers and sampling.

#include "ops/costs.h"

namespace vnpu::ops {
namespace {

using timing::Work;

const bool sampling = price("cost: ApplyTopKTopP TopKTopPSample TopKTopPSampleV2",
                            [](const Call& call, Work& work) { for_each_element(call, work, 40); });

const bool numbers = price(
    "cost: DropoutDoMask DropoutGenMask DropoutGenMaskV2 InplaceBernoulli InplaceBernoulliTensor"
    " InplaceNormal InplaceNormalTensor InplaceRandom InplaceRandomTensor InplaceUniform"
    " InplaceUniformTensor NormalFloatFloat NormalFloatTensor NormalTensorFloat"
    " NormalTensorTensor SimThreadExponential",
    [](const Call& call, Work& work) { for_each_element(call, work, 20); });

// Not on vector cores.
const bool on_ai_cpu =
    price("cost: Multinomial MultinomialTensor Randperm", [](const Call& call, Work& work) {
      for_each_element(call, work, 20);
      work.kind = Work::Class::kAiCpu;
    });

}  // namespace
}  // namespace vnpu::ops
