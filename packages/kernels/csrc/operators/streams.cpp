// Residual streams: their weighted sum before a sublayer, and the writing of its output to them.

#include "launch/stage.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

Operator kSigmoid("aclnnSigmoid");
Operator kAddmm("aclnnAddmm");
Operator kInplaceDiv("aclnnInplaceDiv");

using Float = Number<double>;

struct StreamSizes {
  int64_t tokens, num, hidden, rows;

  explicit StreamSizes(const arguments::collapse_streams& a)
      : StreamSizes(a.streams, a.fn.size(0)) {
    const bool is_mixed = a.sums.has_value();
    TORCH_CHECK_VALUE(a.fn.dim() == 2 && a.fn.size(1) == num * hidden &&
                          rows == 2 * num + (is_mixed ? num * num : 0) &&
                          is_mixed == a.eps.has_value() && a.sinkhorn_steps >= (is_mixed ? 1 : 0),
                      "fn of sizes ", a.fn.sizes(), ", ", a.sinkhorn_steps, " passes and ",
                      is_mixed ? "" : "no ", "sums for ", num, " streams of ", hidden,
                      ": mixed streams take ", num * (num + 2), " rows, a pass, sums and eps");
  }
  StreamSizes(const Tensor& streams, int64_t rows_)
      : tokens(streams.size(0)),
        num(streams.dim() == 3 ? streams.size(1) : 0),
        hidden(streams.size(-1)),
        rows(rows_) {
    TORCH_CHECK_VALUE(num > 0, "streams of sizes ", streams.sizes(),
                      ": give [tokens, streams, hidden]");
  }
};

View floats(Stage& stage, const View& tensor, const View& out) {
  if (tensor.dtype == at::kFloat) return tensor;
  stage.run(kCast, tensor, AclType{at::kFloat}, out);
  return out;
}

// Balances `comb` [tokens, num * num] in place, from the softmax of the logits.
void balance(Stage& stage, const arguments::collapse_streams& a, const View& comb,
             const View& divisors) {
  const View sums = View::of(*a.sums);
  const int64_t size = comb.size(1);
  const auto divide_by = [&](int64_t axis) {
    const View matrix = sums.narrowed(0, axis, 1).reshaped({size, size});
    stage.run(kAddmm, a.eps, comb, matrix, Float{1.0}, Float{1.0}, divisors, kKeepDtype);
    stage.run(kInplaceDiv, comb, divisors);
  };
  stage.run(kInplaceAdd, comb, a.eps, Number<int64_t>{1});
  constexpr int64_t kRows = 0;
  constexpr int64_t kColumns = 1;
  divide_by(kColumns);
  for (int64_t step = 1; step < a.sinkhorn_steps; ++step) {
    divide_by(kRows);
    divide_by(kColumns);
  }
}

}  // namespace

Tensors<3> collapse_streams(const arguments::collapse_streams& a) {
  const StreamSizes s(a);
  const at::ScalarType dtype = a.streams.scalar_type();
  Tensor out = empty({s.tokens, s.hidden}, dtype, a.streams);
  Tensor weights = empty({s.tokens, 2 * s.num}, at::kFloat, a.streams);
  Tensor post = weights.narrow(1, s.num, s.num);
  Tensor comb;
  if (a.sums.has_value()) comb = empty({s.tokens, s.num, s.num}, at::kFloat, a.streams);
  if (a.streams.is_meta() || s.tokens == 0) return {out, post, comb};
  Stage stage("collapse_streams", a.streams);
  const int64_t width = s.num * s.hidden;
  const bool is_float = dtype == at::kFloat;
  const Scratch scratch(a.streams, {{at::kFloat, {is_float ? 0 : s.tokens, width}},
                                    {at::kFloat, {s.tokens, width}},  // normed
                                    {at::kFloat, {s.tokens, 1}},      // deviations, not used
                                    {at::kFloat, {s.tokens, s.rows}},
                                    {at::kFloat, {s.rows}},
                                    {at::kFloat, {s.tokens, s.rows}},  // logits
                                    {at::kFloat, {s.tokens, 2 * s.num}},
                                    {at::kFloat, {s.tokens, s.num * s.num}},
                                    {at::kFloat, {is_float ? 0 : s.tokens, s.hidden}}});
  const View flat = floats(stage, View::of(a.streams).reshaped({s.tokens, width}), scratch[0]);
  stage.run(kRmsNorm, flat, a.gain, a.norm_eps, scratch[1], scratch[2]);
  stage.run(kMm, scratch[1], View::of(a.fn).transposed(0, 1), scratch[3], kKeepDtype);
  constexpr int64_t kFirstDim = 0;
  stage.run(kIndexSelect, a.scale, kFirstDim, a.scale_of_row, scratch[4]);
  stage.run(kAddcmul, a.base, scratch[3], scratch[4], Float{1.0}, scratch[5]);
  stage.run(kSigmoid, scratch[5].narrowed(1, 0, 2 * s.num), scratch[6]);
  stage.run(kAddcmul, a.addends, scratch[6], a.factors, Float{1.0}, weights);
  if (a.sums.has_value()) {
    const int64_t size = s.num * s.num;
    constexpr int64_t kLastDim = -1;
    stage.run(kSoftmax, scratch[5].narrowed(1, 2 * s.num, size).split_last(s.num, s.num), kLastDim,
              comb);
    balance(stage, a, View::of(comb).reshaped({s.tokens, size}), scratch[7]);
  }
  const View sum = is_float ? View::of(out) : scratch[8];
  stage.run(kBatchMatMul, View::of(weights).narrowed(1, 0, s.num).unsqueezed(1),
            flat.reshaped({s.tokens, s.num, s.hidden}), sum.reshaped({s.tokens, 1, s.hidden}),
            kKeepDtype);
  if (!is_float) stage.run(kCast, sum, AclType{dtype}, out);
  stage.submit();
  return {out, post, comb};
}

Tensor expand_streams(const arguments::expand_streams& a) {
  const StreamSizes s(a.streams, 0);
  const at::ScalarType dtype = a.streams.scalar_type();
  TORCH_CHECK_VALUE(a.output.dim() == 2 && a.output.size(0) == s.tokens &&
                        a.output.size(1) == s.hidden && a.output.scalar_type() == dtype,
                    "an output of sizes ", a.output.sizes(), " and ", a.output.scalar_type(),
                    " for streams of sizes ", a.streams.sizes(), " and ", dtype,
                    ": give [tokens, hidden] of the same dtype");
  Tensor out = empty(a.streams.sizes(), dtype, a.streams);
  if (a.streams.is_meta() || s.tokens == 0) return out;
  Stage stage("expand_streams", a.streams);
  const bool is_float = dtype == at::kFloat;
  const std::vector<int64_t> sizes = a.streams.sizes().vec();
  const std::vector<int64_t> none = {0};
  const Scratch scratch(a.streams, {{at::kFloat, is_float ? none : sizes},
                                    {at::kFloat, a.comb.has_value() ? sizes : none},
                                    {at::kFloat, {is_float ? 0 : s.tokens, s.hidden}},
                                    {at::kFloat, is_float ? none : sizes}});
  View kept = floats(stage, View::of(a.streams), scratch[0]);
  if (a.comb.has_value()) {
    stage.run(kBatchMatMul, View::of(*a.comb).transposed(1, 2), kept, scratch[1], kKeepDtype);
    kept = scratch[1];
  }
  const View output = floats(stage, View::of(a.output), scratch[2]);
  const View written = is_float ? View::of(out) : scratch[3];
  stage.run(kAddcmul, kept, View::of(a.post).unsqueezed(-1), output.unsqueezed(1), Float{1.0},
            written);
  if (!is_float) stage.run(kCast, written, AclType{dtype}, out);
  stage.submit();
  return out;
}

}  // namespace davinci
