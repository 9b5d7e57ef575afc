#include "operators/routing.h"

#include "operators/shared.h"

namespace davinci {
namespace {

Operator kGatingTopK("aclnnMoeGatingTopK");
Operator kGatingTopKSoftmax("aclnnMoeGatingTopKSoftmaxV2");

constexpr int64_t kRenormalize = 1;
constexpr int64_t kRenormalizeByRule = 0;  // sigmoid scores are renormalized, softmax not
constexpr int64_t kTopTwoSum = 1;
constexpr int64_t kMaximum = 0;
constexpr double kEpsilon = 1e-20;

}  // namespace

void RoutingRule::check(const Tensor& x, const Tensor& router_logits) const {
  TORCH_CHECK_VALUE(router_logits.dim() == 2 && router_logits.size(0) == x.size(0) &&
                        router_logits.size(1) == num_experts && num_groups > 0 &&
                        num_experts % num_groups == 0,
                    "logits of sizes ", router_logits.sizes(), " for tokens of sizes ", x.sizes(),
                    ", ", num_experts, " experts and ", num_groups,
                    " groups: give [tokens, experts] and groups of equal size");
  TORCH_CHECK_VALUE(!correction_bias.has_value() ||
                        (correction_bias->dim() == 1 && correction_bias->size(0) == num_experts),
                    "a correction bias of sizes ",
                    correction_bias.has_value() ? correction_bias->sizes() : at::IntArrayRef(),
                    " beside logits of sizes ", router_logits.sizes(), ": give [experts]");
}

// The operator requires logits of the bias' dtype and returns weights of that dtype.
Choice::Choice(Stage& stage, const Tensor& x, const Tensor& router_logits, const RoutingRule& rule)
    : Choice(stage, x, router_logits, rule,
             rule.correction_bias.has_value() ? rule.correction_bias->scalar_type()
                                              : router_logits.scalar_type()) {}

Choice::Choice(Stage& stage, const Tensor& x, const Tensor& router_logits, const RoutingRule& rule,
               at::ScalarType type)
    : scratch_(x,
               {{type, {x.size(0), rule.top_k}},
                {at::kInt, {x.size(0), rule.top_k}},
                {x.scalar_type(), {type == x.scalar_type() ? 0 : x.size(0), rule.top_k}},
                {at::kFloat, {x.size(0), rule.num_experts}},  // scores, not used
                {type, {type == router_logits.scalar_type() ? 0 : x.size(0), rule.num_experts}}}),
      weights_(scratch_[0]) {
  View logits = View::of(router_logits);
  if (type != router_logits.scalar_type()) {
    logits = scratch_[4];
    stage.run(kCast, router_logits, AclType{type}, logits);
  }
  const bool has_bias = rule.correction_bias.has_value();
  const bool is_plain =
      !rule.is_sigmoid && rule.num_groups == 1 && !has_bias && rule.scaling_factor == 1.0;
  if (is_plain) {
    stage.run(kGatingTopKSoftmax, logits, nullptr, rule.top_k, kRenormalize,
              /*softmaxFlag=*/false, scratch_[0], scratch_[1], scratch_[3]);
  } else {
    stage.run(kGatingTopK, logits, rule.correction_bias, rule.top_k, rule.num_chosen_groups,
              rule.num_groups, has_bias ? kTopTwoSum : kMaximum, kRenormalizeByRule,
              static_cast<int64_t>(rule.is_sigmoid), /*outFlag=*/false, rule.scaling_factor,
              kEpsilon, scratch_[0], scratch_[1], scratch_[3]);
  }
  if (type != x.scalar_type()) {
    stage.run(kCast, scratch_[0], AclType{x.scalar_type()}, scratch_[2]);
    weights_ = scratch_[2];
  }
}

}  // namespace davinci
