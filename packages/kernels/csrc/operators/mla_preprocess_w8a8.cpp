// The stage before MLA, with int8 projections of rows that are quantized already.

#include "operators/mla_stage.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

Operator kQuantMatmul("aclnnQuantMatmulV5");
Operator kQuantMatmulWeightNz("aclnnQuantMatmulWeightNz");

// One projection: (rows times weight + bias) * scale, and times the rows' scales.
struct QuantMatmul {
  const Tensor &weight, &scale;
  const OptionalTensor& bias;

  void check(const char* name, bool is_scaled_by_row, at::ScalarType result) const {
    const int64_t columns = weight.size(-1);
    TORCH_CHECK_TYPE(weight.scalar_type() == at::kChar, name, "_weight of ", weight.scalar_type(),
                     ": give int8, or use the operator without _w8a8");
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.size(0) == columns, name, "_scale of sizes ",
                      scale.sizes(), ": give one per column of the weight, [", columns, "]");
    TORCH_CHECK_VALUE(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == columns), name,
                      "_bias of sizes ", bias.has_value() ? bias->sizes() : at::IntArrayRef(),
                      ": give one entry per column of the weight, [", columns, "], or None");
    TORCH_CHECK_TYPE(!bias.has_value() || bias->scalar_type() == at::kInt, name,
                     "_bias is added to the sums: give int32, or None");
    // The dtypes of scales that aclnnQuantMatmulV5 accepts; torch_npu converts a float scale first,
    // in a separate launch.
    const bool takes_floats = is_scaled_by_row || result == at::kBFloat16;
    TORCH_CHECK_TYPE(scale.scalar_type() == (takes_floats ? at::kFloat : at::kLong), name,
                     "_scale of ", scale.scalar_type(), " for results of ", result,
                     takes_floats ? ": give fp32"
                                  : " without row scales: give the bits of fp32 values as int64");
  }

  void run(Stage& stage, const View& rows, const std::optional<View>& row_scales, int64_t first,
           const View& out) const {
    constexpr bool kAsItLies = false;
    constexpr int64_t kNoGroups = 0;
    const int64_t columns = out.size(1);
    const View matrix = View::of(weight);
    std::optional<View> addend;
    if (bias.has_value()) addend = View::of(*bias).narrowed(0, first, columns);
    // A weight in the NZ format is passed as a whole (divides_down).
    stage.run(matrix.storage_dims > 0 ? kQuantMatmulWeightNz : kQuantMatmul, rows,
              matrix.narrowed(1, first, columns), row_scales,
              View::of(scale).narrowed(0, first, columns), nullptr, nullptr, nullptr, nullptr,
              addend, kAsItLies, kAsItLies, kNoGroups, out);
  }
};

// Quantization of compressed queries to int8: static with scale and offset, or dynamic per row.
struct QueryQuantization {
  const OptionalTensor &norm, &norm_bias, &scale, &offset;
  double epsilon;

  void check(bool is_scaled_by_row) const {
    TORCH_CHECK_VALUE(
        !norm_bias.has_value() || (norm.has_value() && norm_bias->sizes() == norm->sizes()),
        "q_a_norm_bias of sizes ", norm_bias.has_value() ? norm_bias->sizes() : at::IntArrayRef(),
        ": it needs a q_a_norm of the same sizes");
    const bool is_given = scale.has_value() && offset.has_value();
    TORCH_CHECK_VALUE(scale.has_value() == offset.has_value() &&
                          is_given == (norm.has_value() && !is_scaled_by_row),
                      "q_input_scale ", scale.has_value() ? "given" : "None", ", q_input_offset ",
                      offset.has_value() ? "given" : "None",
                      ": give both for compressed queries when hidden_scale is None, else neither");
    TORCH_CHECK_VALUE(!is_given || (scale->numel() == 1 && offset->numel() == 1),
                      "q_input_scale and q_input_offset are [1] both");
  }
};

class QuantizedProjections : public Projections {
 public:
  explicit QuantizedProjections(const arguments::mla_preprocess_w8a8& a)
      : hidden_states_(a.hidden_states),
        hidden_scale_(a.hidden_scale),
        a_{a.a_weight, a.a_scale, a.a_bias},
        queries_{a.q_a_norm, a.q_a_norm_bias, a.q_input_scale, a.q_input_offset, a.q_epsilon},
        b_{a.q_b_weight, a.q_b_scale, a.q_b_bias} {
    TORCH_CHECK_TYPE(hidden_states_.scalar_type() == at::kChar, "hidden states of ",
                     hidden_states_.scalar_type(),
                     ": give int8 rows, or use the operator without _w8a8");
    TORCH_CHECK_VALUE(
        !hidden_scale_.has_value() ||
            (hidden_scale_->dim() == 1 && hidden_scale_->size(0) == hidden_states_.size(0)),
        "hidden_scale of sizes ",
        hidden_scale_.has_value() ? hidden_scale_->sizes() : at::IntArrayRef(),
        ": give one per row, [", hidden_states_.size(0), "], or None");
    const bool is_scaled_by_row = hidden_scale_.has_value();
    a_.check("a", is_scaled_by_row, a.W_UK.scalar_type());
    b_.check("q_b", is_scaled_by_row, a.W_UK.scalar_type());
    queries_.check(is_scaled_by_row);
  }

  bool is_int8() const override { return true; }
  bool divides_down() const override { return View::of(a_.weight).storage_dims == 0; }

  void down(Stage& stage, int64_t first, const View& out) const override {
    a_.run(stage, View::of(hidden_states_), hidden_scales(), first, out);
  }

  void normalize(Stage& stage, const View& compressed,
                 const CompressedQueries& rows) const override {
    stage.run(kRmsNorm, compressed, *queries_.norm, queries_.epsilon, rows.normed, rows.deviation);
    if (queries_.norm_bias.has_value())
      stage.run(kInplaceAdd, rows.normed, queries_.norm_bias, Number<int64_t>{1});
    if (hidden_scale_.has_value()) {
      stage.run(kDynamicQuant, rows.normed, nullptr, rows.integers, rows.scales);
    } else {
      constexpr int32_t kLastAxis = -1;
      stage.run(kQuantize, rows.normed, queries_.scale, queries_.offset, AclType{at::kChar},
                kLastAxis, rows.integers);
    }
  }

  void up(Stage& stage, const CompressedQueries& rows, const View& out) const override {
    if (!queries_.norm.has_value()) {
      b_.run(stage, View::of(hidden_states_), hidden_scales(), 0, out);
    } else {
      b_.run(stage, rows.integers,
             hidden_scale_.has_value() ? std::optional(rows.scales) : std::nullopt, 0, out);
    }
  }

 private:
  std::optional<View> hidden_scales() const {
    return hidden_scale_.has_value() ? std::optional(View::of(*hidden_scale_)) : std::nullopt;
  }

  const Tensor& hidden_states_;
  const OptionalTensor& hidden_scale_;
  const QuantMatmul a_;
  const QueryQuantization queries_;
  const QuantMatmul b_;
};

}  // namespace

Tensors<5> mla_preprocess_w8a8(const arguments::mla_preprocess_w8a8& a) {
  const MlaInputs inputs = MlaInputs::of(a);
  const MlaSizes sizes(a.hidden_states, a.a_weight, a.q_a_norm, a.q_b_weight, inputs);
  return preprocess("mla_preprocess_w8a8", a.hidden_states, sizes, inputs, QuantizedProjections(a));
}

}  // namespace davinci
