// Selects each token's experts and their weights. Scores are computed in fp32; of equal scores the
// expert with the lower number wins.

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/float_rows.h"
#include "ops/operator.h"
#include "ops/shared_rules.h"

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

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// In the order of a sort: NaN is the largest.
bool is_above(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The k largest of `count` scores, in descending order, the first of equal ones first.
void choose(const float* scores, int64_t count, int64_t k, int64_t* chosen) {
  int64_t found = 0;
  for (int64_t e = 0; e < count; ++e) {
    if (found == k && !is_above(scores[e], scores[chosen[k - 1]])) continue;
    int64_t place = found < k ? found++ : k - 1;
    for (; place > 0 && is_above(scores[e], scores[chosen[place - 1]]); --place) {
      chosen[place] = chosen[place - 1];
    }
    chosen[place] = e;
  }
}

// Experts outside of the best groups get -inf. A group's score is its largest (0) or the sum of its
// two largest scores (1).
void hide_other_groups(float* scores, int64_t experts, const Gating& how) {
  const int64_t size = experts / how.groups;
  std::vector<float> group_scores(static_cast<size_t>(how.groups));
  for (int64_t g = 0; g < how.groups; ++g) {
    const int64_t count = how.group_score == 0 ? 1 : std::min<int64_t>(2, size);
    int64_t best[2];
    choose(scores + g * size, size, count, best);
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += scores[g * size + best[i]];
    group_scores[static_cast<size_t>(g)] = sum;
  }
  std::vector<int64_t> kept(static_cast<size_t>(how.chosen_groups));
  choose(group_scores.data(), how.groups, how.chosen_groups, kept.data());
  for (int64_t g = 0; g < how.groups; ++g) {
    if (std::find(kept.begin(), kept.end(), g) != kept.end()) continue;
    std::fill(scores + g * size, scores + (g + 1) * size, kHidden);
  }
}

// Experts of each row: [rows, k], int64.
Tensor choose_experts(const Tensor& scores, const OptionalTensor& bias, const Gating& how) {
  const int64_t experts = scores.size(-1);
  const int64_t rows = scores.numel() / experts;
  const bool has_groups = how.groups > 1 && how.chosen_groups < how.groups;
  if (has_groups && experts % how.groups != 0) {
    refuse(std::to_string(experts) + " experts do not divide into " + std::to_string(how.groups) +
           " groups.");
  }
  std::vector<int64_t> sizes = scores.sizes().vec();
  sizes.back() = how.k;
  const Tensor chosen = at::empty(sizes, at::kLong);
  const float* const from = scores.const_data_ptr<float>();
  auto* const to = chosen.mutable_data_ptr<int64_t>();
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  std::vector<float> biased(static_cast<size_t>(experts));
  for (int64_t r = 0; r < rows; ++r) {
    std::copy(from + r * experts, from + (r + 1) * experts, biased.begin());
    // The bias takes part in the choice only.
    if (bias) float_rows::add(biased.data(), added.const_data_ptr<float>(), biased.data(), experts);
    if (has_groups) hide_other_groups(biased.data(), experts, how);
    choose(biased.data(), experts, how.k, to + r * how.k);
  }
  return chosen;
}

void gate(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& chosen_before,
          const Gating& how, bool wants_scores, const Out& y, const Out& expert_index,
          const OptionalOut& scores_out) {
  const int64_t experts = x.size(-1);
  if (how.k < 1 || how.k > experts) {
    refuse("k is " + std::to_string(how.k) + ", x has " + std::to_string(experts) + " experts.");
  }
  if (bias && bias->numel() != experts) {
    refuse("bias has " + std::to_string(bias->numel()) + " entries, x has " +
           std::to_string(experts) + " experts.");
  }
  if (x.numel() == 0) return;
  const Tensor scores = activated(x, how.activation).contiguous();
  const Tensor chosen =
      chosen_before ? chosen_before->contiguous() : choose_experts(scores, bias, how);
  const Tensor weights = at::empty(chosen.sizes(), at::kFloat);
  const float* const from = scores.const_data_ptr<float>();
  const auto* const choice = chosen.const_data_ptr<int64_t>();
  float* const to = weights.mutable_data_ptr<float>();
  const bool renormalizes = how.activation == 1 || how.renormalize == 1;
  for (int64_t r = 0; r < scores.numel() / experts; ++r) {
    float sum = 0;
    for (int64_t i = r * how.k; i < (r + 1) * how.k; ++i) {
      if (choice[i] < 0 || choice[i] >= experts) {
        refuse("expert " + std::to_string(choice[i]) + " of row " + std::to_string(r) +
               " is not among the " + std::to_string(experts) + ".");
      }
      to[i] = from[r * experts + choice[i]];
      sum += to[i];
    }
    for (int64_t i = r * how.k; i < (r + 1) * how.k; ++i) {
      if (renormalizes) to[i] /= sum + static_cast<float>(how.epsilon);
      to[i] *= static_cast<float>(how.scaling_factor);
    }
  }
  store(y, weights);
  store(expert_index, chosen);
  if (wants_scores) store(scores_out, scores);
}

// Finished tokens get the number after the last expert.
Tensor with_finished(const Tensor& chosen, const OptionalTensor& finished, int64_t experts) {
  return finished ? chosen.masked_fill(finished->unsqueeze(-1), experts) : chosen;
}

}  // namespace

static Rules rules_of_moe_gating_top_k() {
  return {"aclnnMoeGatingTopK.md, constraints",
          {{"x", {dtype(kFloats), dims(2, 2)}},
           {"x", size_between(-1, 1, 2048), {.tiling = true}},
           {"bias", {same_dtype("x"), dims(1, 1), same_size(0, "x", 1)}},
           {"y", same_dtype("x")},
           {"groups", fits("divide the experts", {"x"},
                           [](const RuleArguments& own) {
                             const int64_t experts = size_of(own.tensor(1), -1);
                             return own.integer() >= 1 && experts % own.integer() == 0;
                           })},
           {"groups",
            {that("leave more experts to each group than groupSelectMode", {"x", "group_score"},
                  [](const RuleArguments& own) {
                    const int64_t experts = size_of(own.tensor(1), -1);
                    return own.integer() <= 1 || experts / own.integer() > own.integer(2);
                  }),
             that("have at most 2048 experts when those of each group are rounded up to 32", {"x"},
                  [](const RuleArguments& own) {
                    const int64_t groups = own.integer();
                    if (groups <= 1) return true;
                    const int64_t each = size_of(own.tensor(1), -1) / groups;
                    return (each + 31) / 32 * 32 * groups <= 2048;
                  })},
            "moe_gating_top_k_tiling.cpp",
            {.tiling = true}},
           {"chosen_groups", that("be 1 to groupCount", {"groups"},
                                  [](const RuleArguments& own) {
                                    return own.integer() >= 1 && own.integer() <= own.integer(1);
                                  })},
           {"k", that("be 1 to the experts of the chosen groups", {"x", "groups", "chosen_groups"},
                      [](const RuleArguments& own) {
                        const int64_t groups = std::max<int64_t>(1, own.integer(2));
                        const int64_t experts =
                            size_of(own.tensor(1), -1) / groups * own.integer(3);
                        return own.integer() >= 1 && own.integer() <= experts;
                      })},
           {"renormalize", one_of(0), {.tiling = true}},
           {"activation, group_score", one_of(0, 1)},
           {"expert_index", dtype({at::kInt})},
           {"scores", dtype({at::kFloat})}},
          {.bytes = 16 * kMiB, .copies = true},
          kBigChips};
}
static void cost_of_moe_gating_top_k(const Call& call, Work& work) {
  for_each_element(call, work, 16);
  work.wide = true;
}
VNPU_OPERATOR(
    MoeGatingTopK,
    (const Tensor& x, const OptionalTensor& bias, int64_t k, int64_t chosen_groups, int64_t groups,
     int64_t group_score, int64_t renormalize, int64_t activation, bool wants_scores,
     double scaling_factor, double epsilon, Out y, Out expert_index, OptionalOut scores),
    {.tier = kT2, .cost = cost_of_moe_gating_top_k, .rules = rules_of_moe_gating_top_k()}) {
  gate(x, bias, {},
       {k, chosen_groups, groups, group_score, renormalize, activation, scaling_factor, epsilon},
       wants_scores, y, expert_index, scores);
}

VNPU_OPERATOR(MoeGatingTopKV2,
              (const Tensor& x, const OptionalTensor& bias, const OptionalTensor& input_ids,
               const OptionalTensor& experts_of_ids, int64_t k, int64_t chosen_groups,
               int64_t groups, int64_t group_score, int64_t renormalize, int64_t activation,
               bool wants_scores, double scaling_factor, double epsilon, Out y, Out expert_index,
               OptionalOut scores),
              {.tier = kT2, .cost = cost_of_moe_gating_top_k}) {
  OptionalTensor chosen;
  if (input_ids && experts_of_ids) {  // the experts depend on the token's id only
    chosen = experts_of_ids->index_select(0, input_ids->to(at::kLong)).to(at::kLong);
  }
  gate(x, bias, chosen,
       {k, chosen_groups, groups, group_score, renormalize, activation, scaling_factor, epsilon},
       wants_scores, y, expert_index, scores);
}

VNPU_OPERATOR(MoeGatingTopKSoftmax,
              (const Tensor& x, const OptionalTensor& finished, int64_t k, Out y, Out expert_index,
               Out row_index),
              {.tier = kT2, .cost = cost_of_moe_gating_top_k}) {
  if (x.numel() == 0) return;
  const auto [weights, chosen] = largest(at::softmax(x.to(at::kFloat), -1), k);
  store(y, weights);
  store(expert_index, with_finished(chosen, finished, x.size(-1)));
  // Number of each row's choices, counted column by column.
  const int64_t rows = x.numel() / x.size(-1);
  store(row_index,
        at::arange(rows * k, at::kInt).view({k, rows}).t().reshape(row_index.tensor.sizes()));
}

static Rules rules_of_moe_gating_top_k_softmax_v2() {
  return {"op-plugin torch_npu-npu_moe_gating_top_k_softmax.md, parameters",
          {{"x", {dtype(kFloats), dims(2, 3)}},
           {"finished", dtype({at::kBool})},
           {"k", that("be 1 to 1024, at most the experts", {"x"},
                      [](const RuleArguments& own) {
                        const int64_t experts = size_of(own.tensor(1), -1);
                        return own.integer() >= 1 &&
                               own.integer() <= std::min<int64_t>(1024, experts);
                      })},
           {"renormalize", one_of(0, 1)},
           {"y", same_dtype("x")},
           {"expert_index", dtype({at::kInt})},
           {"softmax_out", dtype({at::kFloat})}},
          {.bytes = 16 * kMiB, .copies = true},
          kBigChips};
}
VNPU_OPERATOR(MoeGatingTopKSoftmaxV2,
              (const Tensor& x, const OptionalTensor& finished, int64_t k, int64_t renormalize,
               bool wants_softmax, Out y, Out expert_index, OptionalOut softmax_out),
              {.tier = kT2,
               .cost = cost_of_moe_gating_top_k,
               .rules = rules_of_moe_gating_top_k_softmax_v2()}) {
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
