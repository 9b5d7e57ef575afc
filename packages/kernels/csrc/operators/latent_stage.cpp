#include "operators/latent_stage.h"

#include "operators/heads_product.h"

namespace davinci {
namespace {

Operator kKvRmsNormRopeCache("aclnnKvRmsNormRopeCache");
Operator kInterleaveRope("aclnnInterleaveRope");

}  // namespace

LatentSizes::LatentSizes(const Tensor& hidden_states, const Tensor& a_weight,
                         const OptionalTensor& q_a_norm, const Tensor& q_b_weight,
                         const LatentInputs& inputs)
    : tokens(hidden_states.size(0)),
      decode_tokens(inputs.decode_tokens),
      heads(inputs.up_key.size(0)),
      latent(inputs.kv_a_norm.size(0)),
      rope(inputs.rotary_cache.size(-1)),
      nope(inputs.up_key.size(1)),
      query_rank(q_a_norm.has_value() ? q_a_norm->size(0) : 0) {
  const int64_t into_queries = query_rank > 0 ? query_rank : hidden_states.size(1);
  TORCH_CHECK_VALUE(hidden_states.dim() == 2 && a_weight.dim() == 2 &&
                        a_weight.size(0) == hidden_states.size(1) &&
                        a_weight.size(1) == query_rank + latent + rope,
                    "hidden states of sizes ", hidden_states.sizes(), " and a_weight of sizes ",
                    a_weight.sizes(), ": give [tokens, hidden] and [hidden, ",
                    query_rank + latent + rope, "] (rank of the queries, latent and rotary part)");
  TORCH_CHECK_VALUE(q_b_weight.dim() == 2 && q_b_weight.size(0) == into_queries &&
                        q_b_weight.size(1) == heads * (nope + rope),
                    "q_b_weight of sizes ", q_b_weight.sizes(), ": give [", into_queries, ", ",
                    heads * (nope + rope), "] for ", heads, " heads of ", nope, " + ", rope);
  TORCH_CHECK_VALUE(inputs.up_key.dim() == 3 && inputs.up_key.size(2) == latent &&
                        inputs.latent_cache.size(-1) == latent,
                    "up_key of sizes ", inputs.up_key.sizes(), " and a latent cache of sizes ",
                    inputs.latent_cache.sizes(), ": both end in the latent size, ", latent);
  TORCH_CHECK_VALUE(decode_tokens >= 0 && decode_tokens <= tokens, decode_tokens,
                    " decode tokens among ", tokens);
}

LatentQueries preprocess(const char* name, const Tensor& hidden_states, const LatentSizes& s,
                         const LatentInputs& inputs, const Projections& projections) {
  const at::ScalarType dtype = inputs.up_key.scalar_type();
  Stage stage(name, hidden_states);
  void* const side = inputs.side_stream ? Stage::handle(*inputs.side_stream) : nullptr;

  Tensor absorbed, q, latent, k_rope;  // undefined (None) where the step has no such tokens
  Tensor q_rope = empty({s.tokens, s.heads, s.rope}, dtype, hidden_states);
  if (s.decode_tokens > 0)
    absorbed = empty({s.decode_tokens, s.heads, s.latent}, dtype, hidden_states);
  const int64_t query_row = s.query_row();
  const int64_t kv_row = s.kv_row();
  const bool has_rank = s.has_query_rank();
  const int64_t integer_rows = projections.is_int8() && has_rank ? s.tokens : 0;
  const Scratch scratch(hidden_states, {
                                           // down projections; one product where they are one
                                           {dtype, {s.tokens, s.query_rank + kv_row}},
                                           {dtype, {s.tokens, s.query_rank}},  // normed
                                           {at::kFloat, {s.tokens, has_rank ? 1 : 0}},
                                           {at::kChar, {integer_rows, s.query_rank}},
                                           {at::kFloat, {integer_rows}},  // their scales
                                           {dtype, {s.has_prefill() ? 0 : s.tokens, query_row}},
                                           {dtype, {s.has_prefill() ? 0 : s.tokens, s.latent}},
                                           {dtype, {s.has_prefill() ? 0 : s.tokens, s.rope}},
                                       });
  const CompressedQueries compressed{scratch[1], scratch[2], scratch[3], scratch[4]};
  View queries = scratch[5];
  View latent_rows = scratch[6];
  View rope_rows = scratch[7];
  if (s.has_prefill()) {
    q = empty({s.tokens, s.heads, s.nope + s.rope}, dtype, hidden_states);
    latent = empty({s.tokens, s.latent}, dtype, hidden_states);
    k_rope = empty({s.tokens, s.rope}, dtype, hidden_states);
    queries = View::of(q).reshaped({s.tokens, query_row});
    latent_rows = View::of(latent);
    rope_rows = View::of(k_rope);
  }

  const View down_q = scratch[0].narrowed(1, 0, s.query_rank);
  const View down_kv = scratch[0].narrowed(1, s.query_rank, kv_row);
  const auto write_cache = [&] {
    constexpr bool kReturnsRows = true;
    stage.run(kKvRmsNormRopeCache, down_kv.unsqueezed(1).unsqueezed(1), inputs.kv_a_norm,
              inputs.cos, inputs.sin, inputs.slot_mapping, inputs.rotary_cache, inputs.latent_cache,
              nullptr, nullptr, nullptr, nullptr, inputs.kv_epsilon, "PA_BNSD",
              s.has_prefill() ? kReturnsRows : !kReturnsRows,
              rope_rows.reshaped({s.tokens, 1, 1, s.rope}),
              latent_rows.reshaped({s.tokens, 1, 1, s.latent}));
  };
  const auto normalize_queries = [&] {
    if (has_rank) projections.normalize(stage, down_q, compressed);
  };
  const View heads = queries.split_last(s.heads, s.nope + s.rope);
  const auto rotate_queries = [&] {
    stage.run(kInterleaveRope, heads.narrowed(2, s.nope, s.rope).unsqueezed(2), inputs.cos,
              inputs.sin, View::of(q_rope).unsqueezed(2));
  };
  const auto absorb = [&] {
    if (s.decode_tokens == 0) return;
    multiply_heads(stage, heads.narrowed(0, 0, s.decode_tokens).narrowed(2, 0, s.nope),
                   kSwapLeading, inputs.up_key, View::of(absorbed));
  };

  if (side == nullptr) {
    projections.down(stage, 0, scratch[0]);
    normalize_queries();
    projections.up(stage, compressed, queries);
    write_cache();
    rotate_queries();
    absorb();
  } else {
    // Matrix products keep to one at a time; norms, rotations and the cache write run beside them.
    // The down projections are two products where they can be, so that the key-value path starts
    // beside the query path.
    const bool is_divided = has_rank && projections.divides_down();
    if (is_divided) {
      projections.down(stage, 0, down_q);
    } else if (has_rank) {
      projections.down(stage, 0, scratch[0]);
    }
    stage.let_wait(side);
    stage.use(side);
    if (is_divided || !has_rank) projections.down(stage, s.query_rank, down_kv);
    stage.use_own();
    normalize_queries();
    stage.use(side);
    stage.let_wait(stage.own_stream());
    write_cache();
    stage.use_own();
    projections.up(stage, compressed, queries);
    stage.let_wait(side);
    stage.use(side);
    rotate_queries();
    stage.use_own();
    absorb();
    stage.use(side);
    stage.let_wait(stage.own_stream());
    stage.use_own();
  }
  stage.submit();
  return {absorbed, q_rope, q, latent, k_rope};
}

LatentQueries meta_queries(const Tensor& hidden_states, const LatentSizes& s,
                           const LatentInputs& inputs) {
  const auto made = [&](bool exists, at::IntArrayRef sizes) {
    return exists ? empty(sizes, inputs.up_key.scalar_type(), hidden_states) : Tensor();
  };
  return {made(s.decode_tokens > 0, {s.decode_tokens, s.heads, s.latent}),
          made(true, {s.tokens, s.heads, s.rope}),
          made(s.has_prefill(), {s.tokens, s.heads, s.nope + s.rope}),
          made(s.has_prefill(), {s.tokens, s.latent}), made(s.has_prefill(), {s.tokens, s.rope})};
}

}  // namespace davinci
