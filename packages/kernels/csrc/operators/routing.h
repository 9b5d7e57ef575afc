#pragma once

// The choice of every token's experts from the router's logits.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {

// A model's rule for choosing experts. Meaning: operators.routed_experts.
struct RoutingRule {
  const OptionalTensor& correction_bias;
  int64_t top_k, num_groups, num_chosen_groups;
  bool is_sigmoid;
  double scaling_factor;
  int64_t num_experts;

  // a: arguments of an operator that chooses.
  template <class A>
  static RoutingRule of(const A& a) {
    return {a.correction_bias, a.top_k,          a.num_groups, a.num_chosen_groups,
            a.is_sigmoid,      a.scaling_factor, a.num_experts};
  }
  void check(const Tensor& x, const Tensor& router_logits) const;
};

// Launches the choice; keeps the memory of its results.
class Choice {
 public:
  Choice(Stage& stage, const Tensor& x, const Tensor& router_logits, const RoutingRule& rule);
  const View& weights() const { return weights_; }  // [tokens, top_k], dtype of x
  const View& ids() const { return scratch_[1]; }   // [tokens, top_k], int32

 private:
  Choice(Stage& stage, const Tensor& x, const Tensor& router_logits, const RoutingRule& rule,
         at::ScalarType type);
  Scratch scratch_;
  View weights_;
};

}  // namespace davinci
