// Dropout: masks, and what they leave of a tensor.

#include <string>

#include "ops/operator.h"
#include "ops/random/random_numbers.h"

namespace vnpu::ops {
namespace {

// Masks of dropout: one bit per element (1 = kept), the lowest first, in bytes padded to 128 bits.
constexpr int64_t kMaskAlignmentBits = 128;

int64_t mask_bytes(int64_t elements) {
  return (elements + kMaskAlignmentBits - 1) / kMaskAlignmentBits * kMaskAlignmentBits / 8;
}

void write_mask(const Tensor& out, const IntArray& shape, double probability, RandomSource from) {
  require(probability >= 0 && probability <= 1, "prob must lie in [0, 1].");
  require(out.scalar_type() == at::kByte, "the mask must be uint8.");
  const int64_t bytes = mask_bytes(c10::multiply_integers(shape));
  if (out.numel() != bytes) {
    refuse("the mask has " + std::to_string(out.numel()) + " bytes; the shape needs " +
           std::to_string(bytes) + ".");
  }
  const Tensor kept =
      uniform_doubles(bytes * 8, from).ge(probability).to(at::kByte).view({bytes, 8});
  const Tensor place = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  store(out, kept.mul(place).sum(-1, false, at::kByte).view(out.sizes()));
}

}  // namespace

VNPU_OPERATOR(DropoutGenMask,
              (const IntArray& shape, double prob, int64_t seed, int64_t offset, Out out),
              {.cost = elements<20>}) {
  write_mask(out.tensor, shape, prob, random_source(seed, offset));
}
// The dtype of the tensor that is masked does not change the mask.
VNPU_OPERATOR(DropoutGenMaskV2,
              (const IntArray& shape, double prob, int64_t seed, int64_t offset, DType, Out out),
              {.cost = elements<20>}) {
  write_mask(out.tensor, shape, prob, random_source(seed, offset));
}
// What is kept grows by 1 / (1 - prob).
VNPU_OPERATOR(DropoutDoMask, (const Tensor& self, const Tensor& mask, double prob, Out out),
              {.cost = elements<20>}) {
  require(prob >= 0 && prob <= 1, "prob must lie in [0, 1].");
  require(mask.numel() >= mask_bytes(self.numel()), "the mask is shorter than the tensor.");
  const Tensor place = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  const Tensor bits = mask.reshape({-1, 1}).bitwise_and(place).ne(0).flatten();
  const Tensor kept = bits.narrow(0, 0, self.numel()).view(self.sizes());
  const double scale = prob == 1 ? 0 : 1 / (1 - prob);
  store(out, at::where(kept, self * scale, at::zeros({}, self.options())));
}

}  // namespace vnpu::ops
