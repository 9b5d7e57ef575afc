// Copies, casts and changes of layout: elements move, their values stay (up to a cast).

#include "ops/operator.h"
#include "ops/tensor/declarations.h"

namespace vnpu::ops {

// Whatever torch_npu cannot hand to a plain memory copy: casts, strides, broadcasts.
VNPU_OPERATOR(InplaceCopy, (Out self, const Tensor& src),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_inplace_copy}) {
  store(self, src);
}
VNPU_OPERATOR(Cast, (const Tensor& self, DType dtype, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_cast}) {
  require(dtype.type == out.tensor.scalar_type(), "dtype differs from the output's.");
  store(out, self);
}

// --- joining and splitting ----------------------------------------------------------------------

// Empty one-dimensional tensors may stand anywhere in the list.
VNPU_OPERATOR(Cat, (const TensorList& tensors, int64_t dim, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_cat}) {
  at::cat_out(out.tensor, static_cast<const std::vector<Tensor>&>(tensors), dim);
}
VNPU_OPERATOR(Stack, (const TensorList& tensors, int64_t dim, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_stack}) {
  at::stack_out(out.tensor, static_cast<const std::vector<Tensor>&>(tensors), dim);
}
VNPU_OPERATOR(SplitWithSize,
              (const Tensor& self, const IntArray& split_sizes, int64_t dim, const OutList& out),
              {.tier = kT1, .cost = elements<1>}) {
  require(split_sizes.size() == out.size(), "splitSize and out differ in length.");
  const std::vector<Tensor> parts = self.split_with_sizes(split_sizes, dim);
  for (size_t i = 0; i < parts.size(); ++i) store(out[i], parts[i]);
}

// --- repeating ----------------------------------------------------------------------------------

VNPU_OPERATOR(Repeat, (const Tensor& self, const IntArray& repeats, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_repeat}) {
  store(out, self.repeat(repeats));
}
// Without a dim, the flattened input is repeated.
VNPU_OPERATOR(RepeatInterleave,
              (const Tensor& self, const Tensor& repeats, int64_t output_size, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_repeat_interleave}) {
  store(out, self.repeat_interleave(repeats, std::nullopt, output_size));
}
VNPU_OPERATOR(RepeatInterleaveInt,
              (const Tensor& self, int64_t repeats, int64_t output_size, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_repeat_interleave_int}) {
  store(out, self.repeat_interleave(repeats, std::nullopt, output_size));
}
VNPU_OPERATOR(RepeatInterleaveWithDim,
              (const Tensor& self, const Tensor& repeats, int64_t dim, int64_t output_size,
               Out out),
              {.tier = kT1, .cost = elements<1>}) {
  store(out, self.repeat_interleave(repeats, dim, output_size));
}
VNPU_OPERATOR(RepeatInterleaveIntWithDim,
              (const Tensor& self, int64_t repeats, int64_t dim, int64_t output_size, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_repeat_interleave_int}) {
  store(out, self.repeat_interleave(repeats, dim, output_size));
}
// Index i, repeats[i] times.
VNPU_OPERATOR(RepeatInterleaveTensor, (const Tensor& repeats, int64_t output_size, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  store(out, at::repeat_interleave(repeats, std::optional<int64_t>(output_size)));
}

// --- reordering, padding, masking ---------------------------------------------------------------

VNPU_OPERATOR(Flip, (const Tensor& self, const IntArray& dims, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_flip}) {
  store(out, self.flip(dims));
}
// Without dims, the flattened input is rolled.
VNPU_OPERATOR(Roll, (const Tensor& x, const IntArray& shifts, const IntArray& dims, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  store(out, x.roll(shifts, dims));
}
// Pairs (before, after), from the last dimension on; negative pads cut.
VNPU_OPERATOR(ConstantPadNd,
              (const Tensor& self, const IntArray& pad, const Scalar& value, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_constant_pad_nd}) {
  store(out, at::constant_pad_nd(self, pad, value));
}
VNPU_OPERATOR(Triu, (const Tensor& self, int64_t diagonal, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_triu}) {
  at::triu_out(out.tensor, self, diagonal);
}
VNPU_OPERATOR(Tril, (const Tensor& self, int64_t diagonal, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::tril_out(out.tensor, self, diagonal);
}
VNPU_OPERATOR(InplaceTriu, (InOut self, int64_t diagonal), {.tier = kT1, .cost = elements<1>}) {
  self.tensor.triu_(diagonal);
}
VNPU_OPERATOR(InplaceTril, (InOut self, int64_t diagonal), {.tier = kT1, .cost = elements<1>}) {
  self.tensor.tril_(diagonal);
}
// Sliding blocks as columns (torch.nn.functional.unfold).
VNPU_OPERATOR(Im2col,
              (const Tensor& self, const IntArray& kernel_size, const IntArray& dilation,
               const IntArray& padding, const IntArray& stride, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::im2col_out(out.tensor, self, kernel_size, dilation, padding, stride);
}

}  // namespace vnpu::ops
