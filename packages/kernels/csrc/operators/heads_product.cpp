#include "operators/heads_product.h"

namespace davinci {

static Operator kTransposeBatchMatMul("aclnnTransposeBatchMatMul");

void multiply_heads(Stage& stage, const View& x, const std::array<int64_t, 3>& permute,
                    const at::Tensor& weight, const View& out) {
  constexpr int32_t kOneSplit = 1;
  stage.run(kTransposeBatchMatMul, x, weight, nullptr, nullptr, at::IntArrayRef(permute),
            at::IntArrayRef(kAsGiven), at::IntArrayRef(kSwapLeading), kKeepDtype, kOneSplit, out);
}

}  // namespace davinci
