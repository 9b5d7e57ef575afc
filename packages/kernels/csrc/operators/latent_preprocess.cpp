// Everything before latent attention, with float projections.

#include "operators/latent_stage.h"
#include "operators/operators.h"

namespace davinci {
namespace {

Operator kMm("aclnnMm");
Operator kRmsNorm("aclnnRmsNorm");

class FloatProjections : public Projections {
 public:
  FloatProjections(const Tensor& hidden_states, const Tensor& a_weight,
                   const OptionalTensor& q_a_norm, const Tensor& q_b_weight, double epsilon)
      : hidden_states_(hidden_states),
        a_weight_(a_weight),
        q_a_norm_(q_a_norm),
        q_b_weight_(q_b_weight),
        epsilon_(epsilon) {}

  bool is_int8() const override { return false; }
  bool divides_down() const override { return true; }

  void down(Stage& stage, int64_t first, const View& out) const override {
    stage.run(kMm, hidden_states_, View::of(a_weight_).narrowed(1, first, out.size(1)), out,
              kKeepDtype);
  }

  void normalize(Stage& stage, const View& compressed,
                 const CompressedQueries& rows) const override {
    stage.run(kRmsNorm, compressed, *q_a_norm_, epsilon_, rows.normed, rows.deviation);
  }

  void up(Stage& stage, const CompressedQueries& rows, const View& out) const override {
    stage.run(kMm, q_a_norm_.has_value() ? rows.normed : View::of(hidden_states_), q_b_weight_, out,
              kKeepDtype);
  }

 private:
  const Tensor &hidden_states_, &a_weight_;
  const OptionalTensor& q_a_norm_;
  const Tensor& q_b_weight_;
  double epsilon_;
};

}  // namespace

LatentQueries npu::mla_preprocess(const Tensor& hidden_states, const Tensor& a_weight,
                                  const OptionalTensor& q_a_norm, const Tensor& q_b_weight,
                                  const Tensor& kv_a_norm, const Tensor& up_key, const Tensor& cos,
                                  const Tensor& sin, const Tensor& slot_mapping,
                                  const Tensor& latent_cache, const Tensor& rotary_cache,
                                  double q_epsilon, double kv_epsilon, int64_t num_decode_tokens,
                                  const std::optional<c10::Stream>& side_stream) {
  const LatentInputs inputs{kv_a_norm,         up_key,       cos,          sin,
                            slot_mapping,      latent_cache, rotary_cache, kv_epsilon,
                            num_decode_tokens, side_stream};
  const LatentSizes sizes(hidden_states, a_weight, q_a_norm, q_b_weight, inputs);
  return preprocess("mla_preprocess", hidden_states, sizes, inputs,
                    FloatProjections(hidden_states, a_weight, q_a_norm, q_b_weight, q_epsilon));
}

LatentQueries meta::mla_preprocess(const Tensor& hidden_states, const Tensor& a_weight,
                                   const OptionalTensor& q_a_norm, const Tensor& q_b_weight,
                                   const Tensor& kv_a_norm, const Tensor& up_key, const Tensor& cos,
                                   const Tensor& sin, const Tensor& slot_mapping,
                                   const Tensor& latent_cache, const Tensor& rotary_cache, double,
                                   double kv_epsilon, int64_t num_decode_tokens,
                                   const std::optional<c10::Stream>& side_stream) {
  const LatentInputs inputs{kv_a_norm,         up_key,       cos,          sin,
                            slot_mapping,      latent_cache, rotary_cache, kv_epsilon,
                            num_decode_tokens, side_stream};
  return meta_queries(hidden_states,
                      LatentSizes(hidden_states, a_weight, q_a_norm, q_b_weight, inputs), inputs);
}

}  // namespace davinci
