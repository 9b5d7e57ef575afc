#include "operators/mla_stage.h"

#include "operators/heads_product.h"

namespace davinci {
namespace {

Operator kKvRmsNormRopeCache("aclnnKvRmsNormRopeCache");
Operator kInterleaveRope("aclnnInterleaveRope");

}  // namespace

MlaSizes::MlaSizes(const Tensor& hidden_states, const Tensor& a_weight,
                   const OptionalTensor& q_a_norm, const Tensor& q_b_weight,
                   const MlaInputs& inputs)
    : tokens(hidden_states.size(0)),
      decode_tokens(inputs.num_decode_tokens),
      heads(inputs.W_UK.size(0)),
      kv_lora_rank(inputs.kv_a_norm.size(0)),
      rope(inputs.k_pe_cache.size(-1)),
      nope(inputs.W_UK.size(1)),
      q_lora_rank(q_a_norm.has_value() ? q_a_norm->size(0) : 0) {
  const int64_t into_queries = q_lora_rank > 0 ? q_lora_rank : hidden_states.size(1);
  TORCH_CHECK_VALUE(hidden_states.dim() == 2 && a_weight.dim() == 2 &&
                        a_weight.size(0) == hidden_states.size(1) &&
                        a_weight.size(1) == q_lora_rank + kv_lora_rank + rope,
                    "hidden states of sizes ", hidden_states.sizes(), " and a_weight of sizes ",
                    a_weight.sizes(), ": give [tokens, hidden] and [hidden, ",
                    q_lora_rank + kv_lora_rank + rope, "] (q_lora_rank, kv_lora_rank and rope)");
  TORCH_CHECK_VALUE(q_b_weight.dim() == 2 && q_b_weight.size(0) == into_queries &&
                        q_b_weight.size(1) == heads * (nope + rope),
                    "q_b_weight of sizes ", q_b_weight.sizes(), ": give [", into_queries, ", ",
                    heads * (nope + rope), "] for ", heads, " heads of ", nope, " + ", rope);
  TORCH_CHECK_VALUE(inputs.W_UK.dim() == 3 && inputs.W_UK.size(2) == kv_lora_rank &&
                        inputs.kv_c_cache.size(-1) == kv_lora_rank,
                    "W_UK of sizes ", inputs.W_UK.sizes(), " and kv_c_cache of sizes ",
                    inputs.kv_c_cache.sizes(), ": both end in kv_lora_rank, ", kv_lora_rank);
  TORCH_CHECK_VALUE(decode_tokens >= 0 && decode_tokens <= tokens, decode_tokens,
                    " decode tokens among ", tokens);
}

Tensors<5> preprocess(const char* name, const Tensor& hidden_states, const MlaSizes& s,
                      const MlaInputs& inputs, const Projections& projections) {
  const at::ScalarType dtype = inputs.W_UK.scalar_type();
  const auto made = [&](bool exists, at::IntArrayRef shape) {
    return exists ? empty(shape, dtype, hidden_states) : Tensor();  // undefined is None
  };
  Tensor ql_nope = made(s.decode_tokens > 0, {s.decode_tokens, s.heads, s.kv_lora_rank});
  Tensor q_pe = made(true, {s.tokens, s.heads, s.rope});
  Tensor q = made(s.has_prefill(), {s.tokens, s.heads, s.nope + s.rope});
  Tensor kv_c_normed = made(s.has_prefill(), {s.tokens, s.kv_lora_rank});
  Tensor k_pe = made(s.has_prefill(), {s.tokens, s.rope});
  if (hidden_states.is_meta()) return {ql_nope, q_pe, q, kv_c_normed, k_pe};

  Stage stage(name, hidden_states);
  void* const side = inputs.side_stream ? Stage::handle(*inputs.side_stream) : nullptr;
  const int64_t query_row = s.query_row();
  const int64_t kv_row = s.kv_row();
  const bool has_q_lora = s.has_q_lora();
  const int64_t integer_rows = projections.is_int8() && has_q_lora ? s.tokens : 0;
  const int64_t unreturned_rows = s.has_prefill() ? 0 : s.tokens;
  const Scratch scratch(hidden_states, {
                                           // down projections, or one product for both
                                           {dtype, {s.tokens, s.q_lora_rank + kv_row}},
                                           {dtype, {s.tokens, s.q_lora_rank}},  // normed
                                           {at::kFloat, {s.tokens, has_q_lora ? 1 : 0}},
                                           {at::kChar, {integer_rows, s.q_lora_rank}},
                                           {at::kFloat, {integer_rows}},  // their scales
                                           {dtype, {unreturned_rows, query_row}},
                                           {dtype, {unreturned_rows, s.kv_lora_rank}},
                                           {dtype, {unreturned_rows, s.rope}},
                                       });
  const CompressedQueries compressed{scratch[1], scratch[2], scratch[3], scratch[4]};
  View queries = scratch[5];
  View kv_c_rows = scratch[6];
  View k_pe_rows = scratch[7];
  if (s.has_prefill()) {
    queries = View::of(q).reshaped({s.tokens, query_row});
    kv_c_rows = View::of(kv_c_normed);
    k_pe_rows = View::of(k_pe);
  }

  const View down_q = scratch[0].narrowed(1, 0, s.q_lora_rank);
  const View down_kv = scratch[0].narrowed(1, s.q_lora_rank, kv_row);
  const auto write_cache = [&] {
    constexpr bool kReturnsRows = true;
    stage.run(kKvRmsNormRopeCache, down_kv.unsqueezed(1).unsqueezed(1), inputs.kv_a_norm,
              inputs.cos, inputs.sin, inputs.slot_mapping, inputs.k_pe_cache, inputs.kv_c_cache,
              nullptr, nullptr, nullptr, nullptr, inputs.kv_epsilon, "PA_BNSD",
              s.has_prefill() ? kReturnsRows : !kReturnsRows,
              k_pe_rows.reshaped({s.tokens, 1, 1, s.rope}),
              kv_c_rows.reshaped({s.tokens, 1, 1, s.kv_lora_rank}));
  };
  const auto normalize_queries = [&] {
    if (has_q_lora) projections.normalize(stage, down_q, compressed);
  };
  const View heads = queries.split_last(s.heads, s.nope + s.rope);
  const auto rotate_queries = [&] {
    stage.run(kInterleaveRope, heads.narrowed(2, s.nope, s.rope).unsqueezed(2), inputs.cos,
              inputs.sin, View::of(q_pe).unsqueezed(2));
  };
  const auto absorb = [&] {
    if (s.decode_tokens == 0) return;
    multiply_heads(stage, heads.narrowed(0, 0, s.decode_tokens).narrowed(2, 0, s.nope),
                   kSwapLeading, inputs.W_UK, View::of(ql_nope));
  };

  if (side == nullptr) {
    projections.down(stage, 0, scratch[0]);
    normalize_queries();
    projections.up(stage, compressed, queries);
    write_cache();
    rotate_queries();
    absorb();
  } else {
    // Matrix products run one at a time; norms, rotations and the cache write overlap with them. If
    // possible, the down projections are two products, so that the key-value path begins beside the
    // query path.
    const bool is_divided = has_q_lora && projections.divides_down();
    if (is_divided) {
      projections.down(stage, 0, down_q);
    } else if (has_q_lora) {
      projections.down(stage, 0, scratch[0]);
    }
    stage.let_wait(side);
    stage.use(side);
    if (is_divided || !has_q_lora) projections.down(stage, s.q_lora_rank, down_kv);
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
  return {ql_nope, q_pe, q, kv_c_normed, k_pe};
}

}  // namespace davinci
