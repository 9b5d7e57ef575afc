// The stage before MLA, with float projections.

#include "operators/mla_stage.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

class FloatProjections : public Projections {
 public:
  explicit FloatProjections(const arguments::mla_preprocess& a) : a_(a) {}

  bool is_int8() const override { return false; }
  bool divides_down() const override { return true; }

  void down(Stage& stage, int64_t first, const View& out) const override {
    stage.run(kMm, a_.hidden_states, View::of(a_.a_weight).narrowed(1, first, out.size(1)), out,
              kKeepDtype);
  }

  void normalize(Stage& stage, const View& compressed,
                 const CompressedQueries& rows) const override {
    stage.run(kRmsNorm, compressed, *a_.q_a_norm, a_.q_epsilon, rows.normed, rows.deviation);
  }

  void up(Stage& stage, const CompressedQueries& rows, const View& out) const override {
    stage.run(kMm, a_.q_a_norm.has_value() ? rows.normed : View::of(a_.hidden_states),
              a_.q_b_weight, out, kKeepDtype);
  }

 private:
  const arguments::mla_preprocess& a_;
};

}  // namespace

Tensors<5> mla_preprocess(const arguments::mla_preprocess& a) {
  const MlaInputs inputs = MlaInputs::of(a);
  const MlaSizes sizes(a.hidden_states, a.a_weight, a.q_a_norm, a.q_b_weight, inputs);
  return preprocess("mla_preprocess", a.hidden_states, sizes, inputs, FloatProjections(a));
}

}  // namespace davinci
