// Softmax and its logarithm, in float32 inside for 16-bit floats, as ATen's kernels are.

#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

const std::vector<ScalarType> kFloatsAndDouble = with(kFloats, {at::kDouble});
static Rules rules_of_softmax() {
  return {"aclnn_{softmax,logsoftmax}.cpp: dtype lists, CheckShape",
          {{"self, out", dtype(kFloatsAndDouble), kOnBigChips}, {"out", same_sizes("self")}}};
}
VNPU_OPERATOR(Softmax, (const Tensor& self, int64_t dim, Out out),
              {.cost = elements<8>, .rules = rules_of_softmax()}) {
  if (out.tensor.scalar_type() == self.scalar_type()) {
    at::_softmax_out(out.tensor, self, dim, /*half_to_float=*/false);
  } else {
    store(out, at::softmax(self, dim, out.tensor.scalar_type()));
  }
}
VNPU_OPERATOR(LogSoftmax, (const Tensor& self, int64_t dim, Out out),
              {.cost = elements<8>, .rules = rules_of_softmax()}) {
  if (out.tensor.scalar_type() == self.scalar_type()) {
    at::_log_softmax_out(out.tensor, self, dim, /*half_to_float=*/false);
  } else {
    store(out, at::log_softmax(self, dim, out.tensor.scalar_type()));
  }
}

}  // namespace vnpu::ops
