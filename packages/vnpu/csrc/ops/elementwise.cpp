// Element-wise arithmetic: binary operators in tensor-tensor, tensor-scalar and in-place forms.

#include "ops/operator.h"

namespace vnpu::ops {

VNPU_OPERATOR(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out)) {
  store(out, at::add(self, other, alpha));
}
VNPU_OPERATOR(Adds, (const Tensor& self, const Scalar& other, const Scalar& alpha, Out out)) {
  store(out, at::add(self, other, alpha));
}
VNPU_OPERATOR(InplaceAdd, (InOut self, const Tensor& other, const Scalar& alpha)) {
  store(self, at::add(self.tensor, other, alpha));
}

}  // namespace vnpu::ops
