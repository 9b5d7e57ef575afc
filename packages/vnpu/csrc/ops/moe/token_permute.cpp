// Permutations of tokens by expert, as training and exchanges between ranks ask for them, and back.

#include "ops/moe/assignments.h"
#include "ops/operator.h"

namespace vnpu::ops {

static void cost_of_moe_token_permute(const Call& call, Work& work) {
  const int64_t bytes = bytes_of(call.tensor("permuted"));
  work.read_bytes = bytes;
  work.written_bytes = bytes;
  work.vector_operations = 32 * call.tensor("sorted_indices").numel();
}
VNPU_OPERATOR(MoeTokenPermute,
              (const Tensor& tokens, const Tensor& indices, int64_t out_tokens, bool padded_mode,
               Out permuted, Out sorted_indices),
              {.tier = kT2, .cost = cost_of_moe_token_permute}) {
  require(!padded_mode, "paddedMode is not supported by the device either.");
  if (indices.numel() == 0) return;
  const int64_t k = indices.dim() == 1 ? 1 : indices.size(1);
  const SortedAssignments all = sort_assignments(indices);
  store(sorted_indices, positions(all.assignments));
  const int64_t rows = permuted.tensor.size(0);  // outTokens, or all when it is 0 or negative
  require(out_tokens <= indices.numel() && rows <= indices.numel(),
          "numOutTokens exceeds the tokens.");
  store(permuted, tokens.index_select(0, at::floor_divide(all.assignments.narrow(0, 0, rows), k)));
}

static void cost_of_moe_token_unpermute(const Call& call, Work& work) {
  work.read_bytes = bytes_of(call.tensor("permuted"));
  work.written_bytes = bytes_of(call.tensor("out"));
  work.vector_operations = 2 * call.tensor("permuted").numel();
}
VNPU_OPERATOR(MoeTokenUnpermute,
              (const Tensor& permuted, const Tensor& sorted_indices, const OptionalTensor& weights,
               bool padded_mode, const OptionalIntArray&, Out out),
              {.tier = kT2, .cost = cost_of_moe_token_unpermute}) {
  require(!padded_mode, "paddedMode is not supported by the device either.");
  if (out.tensor.numel() == 0) return;
  const int64_t k = weights ? weights->size(1) : 1;
  const Tensor index = sorted_indices.to(at::kLong).view({-1, k});
  const Tensor rows = permuted.to(at::kFloat);
  Tensor sum = at::zeros(out.tensor.sizes(), at::kFloat);
  for (int64_t i = 0; i < k; ++i) {
    const Tensor which = index.select(1, i);
    const Tensor dropped = which.ge(rows.size(0));  // numOutTokens left it out
    Tensor part =
        rows.index_select(0, which.masked_fill(dropped, 0)).masked_fill(dropped.unsqueeze(-1), 0);
    if (weights) part = part * weights->select(1, i).to(at::kFloat).unsqueeze(-1);
    sum = sum + part;
  }
  store(out, sum);
}

VNPU_OPERATOR(MoeTokenPermuteWithRoutingMap,
              (const Tensor& tokens, const Tensor& routing_map, const OptionalTensor& weights,
               int64_t out_tokens, bool drop_and_pad, Out permuted, OptionalOut weights_out,
               Out sorted_indices),
              {.tier = kT2, .cost = cost_of_moe_token_permute}) {
  if (permuted.tensor.numel() == 0) return;
  const int64_t count = routing_map.size(0);
  const int64_t experts = routing_map.size(1);
  const Tensor map = routing_map.to(at::kBool).t().contiguous();  // [experts, tokens]
  if (drop_and_pad) {
    const int64_t capacity = out_tokens / experts;
    const Tensor chosen =  // per expert the tokens routed to it first, then others as padding
        at::argsort(map.to(at::kByte), /*stable=*/true, -1, /*descending=*/true)
            .narrow(1, 0, capacity);
    store(sorted_indices, chosen.reshape({-1}));
    store(permuted, tokens.index_select(0, chosen.reshape({-1})));
    if (weights && weights_out) store(weights_out, weights->t().gather(1, chosen).reshape({-1}));
    return;
  }
  const Tensor of_token =
      at::arange(count, at::kLong).expand({experts, count}).masked_select(map);  // expert by expert
  if (of_token.size(0) != permuted.tensor.size(0)) {
    refuse("routingMap routes " + std::to_string(of_token.size(0)) + " times, numOutTokens is " +
           std::to_string(out_tokens) + ".");
  }
  store(sorted_indices, at::argsort(of_token, /*stable=*/true, 0, /*descending=*/false));
  store(permuted, tokens.index_select(0, of_token));
  if (weights && weights_out) store(weights_out, weights->t().masked_select(map));
}

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
  // counts [ranks, experts]: tokens lie rank by rank, within a rank expert by expert; they shall
  // lie expert by expert, within an expert rank by rank.
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
