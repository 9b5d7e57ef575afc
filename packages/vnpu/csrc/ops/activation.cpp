// Gated activations of model layers: float32 inside, rounded once.

#include <ATen/Parallel.h>

#include "ops/float_rows.h"
#include "ops/operator.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kGrainElements = 16384;  // work worth a second thread

// The halves of x along `dim`: the gate and what it scales.
std::pair<Tensor, Tensor> halves(const Tensor& x, int64_t dim) {
  require(x.dim() > 0, "x must have at least 1 dimension");
  const int64_t size = x.size(dim);
  if (size % 2 != 0) {
    refuse("the dimension to split must be even; dimension " + std::to_string(dim) + " of x is " +
           std::to_string(size));
  }
  return {x.narrow(dim, 0, size / 2), x.narrow(dim, size / 2, size / 2)};
}

// x [rows, 2 * columns] -> out [rows, columns], both dense.
template <class T>
void swiglu_rows(const Tensor& x, const Tensor& out, int64_t columns) {
  const T* source = x.const_data_ptr<T>();
  T* target = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.numel() / columns, std::max<int64_t>(1, kGrainElements / columns),
                   [&](int64_t begin, int64_t end) {
                     std::vector<float> gate(columns);
                     std::vector<float> value(columns);
                     for (int64_t i = begin; i < end; ++i) {
                       const T* row = source + 2 * i * columns;
                       float_rows::load(row, gate.data(), columns);
                       float_rows::load(row + columns, value.data(), columns);
                       float_rows::silu_multiply(gate.data(), value.data(), gate.data(), columns);
                       float_rows::store(gate.data(), target + i * columns, columns);
                     }
                   });
}

}  // namespace

// silu(first half) * second half
VNPU_OPERATOR(SwiGlu, (const Tensor& x, int64_t dim, Out out)) {
  const auto [gate, value] = halves(x, dim);
  if (out.tensor.numel() == 0) return;
  const ScalarType type = x.scalar_type();
  const bool last = dim == -1 || dim == x.dim() - 1;
  if (last && type == at::kBFloat16 && out.tensor.scalar_type() == type && x.is_contiguous() &&
      out.tensor.is_contiguous()) {
    swiglu_rows<at::BFloat16>(x, out.tensor, gate.size(-1));
  } else if (last && type == at::kFloat && out.tensor.scalar_type() == type && x.is_contiguous() &&
             out.tensor.is_contiguous()) {
    swiglu_rows<float>(x, out.tensor, gate.size(-1));
  } else {
    store(out, at::silu(widen(gate)).mul_(widen(value)));
  }
}

}  // namespace vnpu::ops
