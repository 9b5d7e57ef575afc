// Mixture of experts on one rank: from the router's logits, or from chosen experts, to each token's
// weighted sum over this rank's experts.

#include "launch/stage.h"
#include "operators/operators.h"
#include "operators/routing.h"

namespace davinci {
namespace {

Operator kInitRouting("aclnnMoeInitRoutingV3");
Operator kGroupedMatmul("aclnnGroupedMatmulV5");
Operator kGroupedMatmulWeightNz("aclnnGroupedMatmulWeightNz");
Operator kSwiGlu("aclnnSwiGlu");
Operator kDequantSwigluQuant("aclnnDequantSwigluQuant");
Operator kFinalizeRouting("aclnnMoeFinalizeRoutingV2");

// Arguments of the routing operators.
constexpr int64_t kCounts = 1;  // how many tokens each expert has, not where they end
constexpr int64_t kNoCapacity = -1;
constexpr int64_t kDropless = 0;
constexpr int64_t kGatherIndex = 0;      // rowIdxType: where each assignment's row lies
constexpr int64_t kRowsMayBeAbsent = 3;  // dropPadMode: row -1 means no row on this rank
constexpr int64_t kNoQuantization = -1;
constexpr int64_t kScalePerRow = 1;
// Arguments of the grouped product.
constexpr int64_t kSingleOutput = 2;
constexpr int64_t kSplitRows = 0;
constexpr int64_t kNoActivation = 0;

struct ExpertSizes {
  int64_t tokens, hidden, top_k, local, intermediate;

  ExpertSizes(const Tensor& x, int64_t top_k_, const Tensor& gate_up, const Tensor& down,
              int64_t first_expert, int64_t num_experts)
      : tokens(x.size(0)),
        hidden(x.size(-1)),
        top_k(top_k_),
        local(gate_up.size(0)),
        intermediate(down.dim() == 3 ? down.size(1) : 0) {
    TORCH_CHECK_VALUE(x.dim() == 2 && gate_up.dim() == 3 && down.dim() == 3 &&
                          gate_up.size(1) == hidden && gate_up.size(2) == 2 * intermediate &&
                          down.size(0) == local && down.size(2) == hidden,
                      "tokens of sizes ", x.sizes(), ", gate_up of sizes ", gate_up.sizes(),
                      " and down of sizes ", down.sizes(),
                      ": give [tokens, hidden], [experts, hidden, 2 * intermediate] and [experts, "
                      "intermediate, hidden]");
    TORCH_CHECK_VALUE(first_expert >= 0 && first_expert + local <= num_experts, "experts ",
                      first_expert, " to ", first_expert + local, " of ", num_experts);
  }
  int64_t rows() const { return tokens * top_k; }
};

void check_assignments(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids) {
  TORCH_CHECK_VALUE(topk_ids.dim() == 2 && topk_ids.sizes() == topk_weights.sizes() &&
                        topk_ids.size(0) == x.size(0),
                    "weights of sizes ", topk_weights.sizes(), " and experts of sizes ",
                    topk_ids.sizes(), " for tokens of sizes ", x.sizes(),
                    ": give [tokens, top_k] both");
}

// Scales that turn int32 sums into floats: of the weight's columns, and of the rows.
struct ProductScales {
  View columns, rows;
};

void multiply(Stage& stage, const View& rows, const Tensor& weight, const View& counts,
              const View& out, const std::optional<ProductScales>& scales = std::nullopt) {
  const View matrix = View::of(weight);
  const auto run = [&](Operator& op, const auto&... after_tuning) {
    if (scales) {
      stage.run(op, Views{{rows}}, Views{{matrix}}, nullptr, Views{{scales->columns}}, nullptr,
                nullptr, nullptr, Views{{scales->rows}}, counts, nullptr, nullptr, nullptr,
                kSingleOutput, kSplitRows, kCounts, kNoActivation, nullptr, after_tuning...,
                Views{{out}}, nullptr, nullptr);
    } else {
      stage.run(op, Views{{rows}}, Views{{matrix}}, nullptr, nullptr, nullptr, nullptr, nullptr,
                nullptr, counts, nullptr, nullptr, nullptr, kSingleOutput, kSplitRows, kCounts,
                kNoActivation, nullptr, after_tuning..., Views{{out}}, nullptr, nullptr);
    }
  };
  constexpr int64_t kNoQuantGroups = 0;
  if (matrix.storage_dims > 0) {  // NZ format
    run(kGroupedMatmulWeightNz, kNoQuantGroups);
  } else {
    run(kGroupedMatmul);
  }
}

// Routed tokens and their experts, for a stage of experts in any precision.
struct Assignments {
  const Tensor& x;
  View topk_weights, topk_ids;
  int64_t first_expert, num_experts;
};

// For an operator that gets the assignments.
template <class A>
Assignments given(const A& a) {
  return {a.x, View::of(a.topk_weights), View::of(a.topk_ids), a.first_expert, a.num_experts};
}

// For an operator that chooses the assignments.
template <class A>
Assignments chosen(const A& a, const Choice& choice) {
  return {a.x, choice.weights(), choice.ids(), a.first_expert, a.num_experts};
}

// Copies of the tokens in the order of their experts, quantized row by row when rows are int8.
void sort_by_expert(Stage& stage, const ExpertSizes& s, const Assignments& a, const View& rows,
                    const View& row_of_assignment, const View& counts, const View& scales) {
  const std::array<int64_t, 2> range = {a.first_expert, a.first_expert + s.local};
  stage.run(kInitRouting, a.x, a.topk_ids, nullptr, nullptr, s.rows(), kNoCapacity, a.num_experts,
            kDropless, kCounts, /*expertTokensNumFlag=*/true,
            rows.dtype == at::kChar ? kScalePerRow : kNoQuantization, at::IntArrayRef(range),
            kGatherIndex, rows, row_of_assignment, counts, scales);
}

void sum_by_token(Stage& stage, const Assignments& a, const View& rows,
                  const View& row_of_assignment, const Tensor& out) {
  stage.run(kFinalizeRouting, rows.unsqueezed(0), row_of_assignment, nullptr, nullptr, nullptr,
            a.topk_weights, nullptr, kRowsMayBeAbsent, out);
}

void compute(Stage& stage, const ExpertSizes& s, const Assignments& a, const Tensor& gate_up,
             const Tensor& down, const Tensor& out) {
  const at::ScalarType dtype = a.x.scalar_type();
  const Scratch scratch(a.x, {{dtype, {s.rows(), s.hidden}},            // tokens by expert
                              {at::kInt, {s.rows()}},                   // row of each assignment
                              {at::kLong, {s.local}},                   // tokens of each expert
                              {at::kFloat, {s.rows()}},                 // scales, not used
                              {dtype, {s.rows(), 2 * s.intermediate}},  // gate and up
                              {dtype, {s.rows(), s.intermediate}},
                              {dtype, {s.rows(), s.hidden}}});
  sort_by_expert(stage, s, a, scratch[0], scratch[1], scratch[2], scratch[3]);
  multiply(stage, scratch[0], gate_up, scratch[2], scratch[4]);
  constexpr int64_t kLastDim = -1;
  stage.run(kSwiGlu, scratch[4], kLastDim, scratch[5]);
  multiply(stage, scratch[5], down, scratch[2], scratch[6]);
  sum_by_token(stage, a, scratch[6], scratch[1], out);
}

// Weights in int8, [experts, in, out], and a scale per column.
struct IntegerWeights {
  const Tensor &gate_up, &gate_up_scale, &down, &down_scale;

  void check(const ExpertSizes& s) const {
    TORCH_CHECK_TYPE(gate_up.scalar_type() == at::kChar && down.scalar_type() == at::kChar,
                     "weights of ", gate_up.scalar_type(), " and ", down.scalar_type(),
                     ": give int8, or use the operator without _w8a8");
    TORCH_CHECK_VALUE(gate_up_scale.dim() == 2 && gate_up_scale.size(0) == s.local &&
                          gate_up_scale.size(1) == 2 * s.intermediate && down_scale.dim() == 2 &&
                          down_scale.size(0) == s.local && down_scale.size(1) == s.hidden,
                      "scales of sizes ", gate_up_scale.sizes(), " and ", down_scale.sizes(),
                      ": give one per column, [", s.local, ", ", 2 * s.intermediate, "] and [",
                      s.local, ", ", s.hidden, "]");
  }
};

void compute(Stage& stage, const ExpertSizes& s, const Assignments& a, const IntegerWeights& w,
             const Tensor& out) {
  const Scratch scratch(a.x, {{at::kChar, {s.rows(), s.hidden}},           // tokens by expert
                              {at::kInt, {s.rows()}},                      // row of each assignment
                              {at::kLong, {s.local}},                      // tokens of each expert
                              {at::kFloat, {s.rows()}},                    // their scales
                              {at::kInt, {s.rows(), 2 * s.intermediate}},  // gate and up, sums
                              {at::kChar, {s.rows(), s.intermediate}},     // activated
                              {at::kFloat, {s.rows()}},                    // their scales
                              {a.x.scalar_type(), {s.rows(), s.hidden}}});
  sort_by_expert(stage, s, a, scratch[0], scratch[1], scratch[2], scratch[3]);
  multiply(stage, scratch[0], w.gate_up, scratch[2], scratch[4]);
  stage.run(kDequantSwigluQuant, scratch[4], w.gate_up_scale, scratch[3], nullptr, nullptr, nullptr,
            scratch[2], /*activateLeft=*/true, "dynamic", scratch[5], scratch[6]);
  multiply(stage, scratch[5], w.down, scratch[2], scratch[7],
           ProductScales{View::of(w.down_scale), scratch[6]});
  sum_by_token(stage, a, scratch[7], scratch[1], out);
}

}  // namespace

Tensor experts(const arguments::experts& a) {
  check_assignments(a.x, a.topk_weights, a.topk_ids);
  const ExpertSizes s(a.x, a.topk_ids.size(1), a.gate_up, a.down, a.first_expert, a.num_experts);
  Tensor out = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta()) return out;
  Stage stage("experts", a.x);
  compute(stage, s, given(a), a.gate_up, a.down, out);
  stage.submit();
  return out;
}

Tensor experts_w8a8(const arguments::experts_w8a8& a) {
  check_assignments(a.x, a.topk_weights, a.topk_ids);
  const ExpertSizes s(a.x, a.topk_ids.size(1), a.gate_up, a.down, a.first_expert, a.num_experts);
  const IntegerWeights weights{a.gate_up, a.gate_up_scale, a.down, a.down_scale};
  weights.check(s);
  Tensor out = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta()) return out;
  Stage stage("experts_w8a8", a.x);
  compute(stage, s, given(a), weights, out);
  stage.submit();
  return out;
}

Tensor routed_experts(const arguments::routed_experts& a) {
  const RoutingRule rule = RoutingRule::of(a);
  rule.check(a.x, a.router_logits);
  const ExpertSizes s(a.x, a.top_k, a.gate_up, a.down, a.first_expert, a.num_experts);
  Tensor out = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta()) return out;
  Stage stage("routed_experts", a.x);
  const Choice choice(stage, a.x, a.router_logits, rule);
  compute(stage, s, chosen(a, choice), a.gate_up, a.down, out);
  stage.submit();
  return out;
}

Tensor routed_experts_w8a8(const arguments::routed_experts_w8a8& a) {
  const RoutingRule rule = RoutingRule::of(a);
  rule.check(a.x, a.router_logits);
  const ExpertSizes s(a.x, a.top_k, a.gate_up, a.down, a.first_expert, a.num_experts);
  const IntegerWeights weights{a.gate_up, a.gate_up_scale, a.down, a.down_scale};
  weights.check(s);
  Tensor out = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta()) return out;
  Stage stage("routed_experts_w8a8", a.x);
  const Choice choice(stage, a.x, a.router_logits, rule);
  compute(stage, s, chosen(a, choice), weights, out);
  stage.submit();
  return out;
}

}  // namespace davinci
