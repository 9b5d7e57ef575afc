// Tokens that ranks have sent, ordered by expert.

#include "ops/moe/assignments.h"
#include "ops/operator.h"

namespace vnpu::ops {

static Rules rules_of_moe_re_routing() {
  return {"op-plugin torch_npu-npu_moe_re_routing.md, parameters",
          {{"tokens", {dtype({at::kHalf, at::kBFloat16, at::kChar}), dims(2, 2)}},
           {"tokens", size_between(1, 1, 16383), {.tiling = true}},
           {"counts", {dtype({at::kInt, at::kLong}), dims(2, 2)}},
           {"scales", {dtype({at::kFloat}), dims(1, 1), same_size(0, "tokens", 0)}},
           {"count_form", one_of(1), {.tiling = true}},
           {"index_type", one_of(0), {.tiling = true}},
           {"index_out", dtype({at::kInt})},
           {"counts_out", same_dtype("counts")}},
          {.bytes = 16 * kMiB, .copies = true},
          kBigChips};
}
VNPU_OPERATOR(MoeReRouting,
              (const Tensor& tokens, const Tensor& counts, const OptionalTensor& scales,
               int64_t count_form, int64_t index_type, Out tokens_out, OptionalOut scales_out,
               Out index_out, Out counts_out),
              {.tier = kT2, .cost = elements<1>, .rules = rules_of_moe_re_routing()}) {
  // counts [ranks, experts]: the input's tokens are ordered by rank, then by expert; the output's
  // by expert, then by rank.
  const Tensor sizes = counts.to(at::kLong).contiguous();
  const Tensor per_expert = sizes.sum(0);
  store(counts_out, count_form == 0 ? per_expert.cumsum(0) : per_expert);
  if (tokens.numel() == 0) return;
  const Tensor experts = at::arange(sizes.size(1), at::kLong).repeat({sizes.size(0)});
  const Tensor of_token = at::repeat_interleave(experts, sizes.reshape({-1}));
  if (of_token.size(0) != tokens.size(0)) {
    refuse("expertTokenNumPerRank sums to " + std::to_string(of_token.size(0)) + ", there are " +
           std::to_string(tokens.size(0)) + " tokens.");
  }
  const Tensor source = sort_assignments(of_token).assignments;
  store(tokens_out, tokens.index_select(0, source));
  store(index_out, index_type == 0 ? source : positions(source));
  if (scales && scales_out) store(scales_out, scales->index_select(0, source));
}

}  // namespace vnpu::ops
