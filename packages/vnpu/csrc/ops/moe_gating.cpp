// Which experts a token goes to, and with what weight. Scores are computed in fp32; of equal scores
// the expert with the lower number wins.

#include <limits>

#include "ops/operator.h"

namespace vnpu::ops {
namespace {

// The k largest of the last dimension, in descending order: values and int64 indices.
std::pair<Tensor, Tensor> largest(const Tensor& scores, int64_t k) {
  const auto [values, indices] = at::sort(scores, /*stable=*/true, -1, /*descending=*/true);
  return {values.narrow(-1, 0, k), indices.narrow(-1, 0, k)};
}

struct Gating {
  int64_t k, chosen_groups, groups, group_score, renormalize, activation;
  double scaling_factor, epsilon;
};

Tensor activated(const Tensor& x, int64_t activation) {
  const Tensor wide = x.to(at::kFloat);
  if (activation == 0) return at::softmax(wide, -1);
  if (activation == 1) return at::sigmoid(wide);
  refuse("normType " + std::to_string(activation) + " is not known; use 0 softmax or 1 sigmoid.");
}

// Experts outside of the best groups get -inf. A group's score is its largest (0) or the sum of its
// two largest scores (1).
Tensor within_groups(const Tensor& scores, const Gating& how) {
  const int64_t experts = scores.size(-1);
  if (how.groups <= 1 || how.chosen_groups >= how.groups) return scores;
  if (experts % how.groups != 0) {
    refuse(std::to_string(experts) + " experts do not divide into " + std::to_string(how.groups) +
           " groups.");
  }
  const Tensor grouped = scores.view({-1, how.groups, experts / how.groups});
  const Tensor group_scores =
      how.group_score == 0 ? grouped.amax(-1)
                           : largest(grouped, std::min<int64_t>(2, grouped.size(-1))).first.sum(-1);
  const Tensor chosen = largest(group_scores, how.chosen_groups).second;
  const Tensor hidden = at::ones(group_scores.sizes(), at::kBool).scatter(-1, chosen, false);
  return grouped.masked_fill(hidden.unsqueeze(-1), -std::numeric_limits<double>::infinity())
      .view(scores.sizes());
}

void gate(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& chosen_before,
          const Gating& how, bool wants_scores, const Out& y, const Out& expert_index,
          const OptionalOut& scores_out) {
  if (how.k < 1 || how.k > x.size(-1)) {
    refuse("k is " + std::to_string(how.k) + ", x has " + std::to_string(x.size(-1)) + " experts.");
  }
  if (x.numel() == 0) return;
  const Tensor scores = activated(x, how.activation).contiguous();
  Tensor chosen;
  if (chosen_before) {
    chosen = *chosen_before;
  } else {
    // The bias takes part in the choice only.
    const Tensor biased = bias ? scores + bias->to(at::kFloat) : scores;
    chosen = largest(within_groups(biased, how), how.k).second;
  }
  Tensor weights = scores.gather(-1, chosen);
  if (how.activation == 1 || how.renormalize == 1) {
    weights = weights / (weights.sum(-1, /*keepdim=*/true) + how.epsilon);
  }
  store(y, weights * how.scaling_factor);
  store(expert_index, chosen);
  if (wants_scores) store(scores_out, scores);
}

// Tokens that are finished get the number after the last expert.
Tensor with_finished(const Tensor& chosen, const OptionalTensor& finished, int64_t experts) {
  return finished ? chosen.masked_fill(finished->unsqueeze(-1), experts) : chosen;
}

}  // namespace

VNPU_OPERATOR(MoeGatingTopK,
              (const Tensor& x, const OptionalTensor& bias, int64_t k, int64_t chosen_groups,
               int64_t groups, int64_t group_score, int64_t renormalize, int64_t activation,
               bool wants_scores, double scaling_factor, double epsilon, Out y, Out expert_index,
               OptionalOut scores)) {
  gate(x, bias, {},
       {k, chosen_groups, groups, group_score, renormalize, activation, scaling_factor, epsilon},
       wants_scores, y, expert_index, scores);
}

VNPU_OPERATOR(MoeGatingTopKV2,
              (const Tensor& x, const OptionalTensor& bias, const OptionalTensor& input_ids,
               const OptionalTensor& experts_of_ids, int64_t k, int64_t chosen_groups,
               int64_t groups, int64_t group_score, int64_t renormalize, int64_t activation,
               bool wants_scores, double scaling_factor, double epsilon, Out y, Out expert_index,
               OptionalOut scores)) {
  OptionalTensor chosen;
  if (input_ids && experts_of_ids) {  // the experts depend on the token's id only
    chosen = experts_of_ids->index_select(0, input_ids->to(at::kLong)).to(at::kLong);
  }
  gate(x, bias, chosen,
       {k, chosen_groups, groups, group_score, renormalize, activation, scaling_factor, epsilon},
       wants_scores, y, expert_index, scores);
}

VNPU_OPERATOR(MoeGatingTopKSoftmax, (const Tensor& x, const OptionalTensor& finished, int64_t k,
                                     Out y, Out expert_index, Out row_index)) {
  if (x.numel() == 0) return;
  const auto [weights, chosen] = largest(at::softmax(x.to(at::kFloat), -1), k);
  store(y, weights);
  store(expert_index, with_finished(chosen, finished, x.size(-1)));
  // Row i, choice j has the number that it has when choices are numbered column by column.
  const int64_t rows = x.numel() / x.size(-1);
  store(row_index,
        at::arange(rows * k, at::kInt).view({k, rows}).t().reshape(row_index.tensor.sizes()));
}

VNPU_OPERATOR(MoeGatingTopKSoftmaxV2,
              (const Tensor& x, const OptionalTensor& finished, int64_t k, int64_t renormalize,
               bool wants_softmax, Out y, Out expert_index, OptionalOut softmax_out)) {
  if (x.numel() == 0) return;
  const Tensor wide = x.to(at::kFloat);
  if (renormalize == 1) {  // the softmax is over the chosen ones only
    const auto [logits, chosen] = largest(wide, k);
    store(y, at::softmax(logits, -1));
    store(expert_index, with_finished(chosen, finished, x.size(-1)));
    return;
  }
  const Tensor softmax = at::softmax(wide, -1);
  const auto [weights, chosen] = largest(softmax, k);
  store(y, weights);
  store(expert_index, with_finished(chosen, finished, x.size(-1)));
  if (wants_softmax) store(softmax_out, softmax);
}

}  // namespace vnpu::ops
