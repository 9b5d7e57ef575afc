// Multi-head latent attention: everything before the attention of decodes, and that attention.

#include <c10/core/Stream.h>

#include "launch/stage.h"
#include "operators/fused_attention.h"
#include "operators/operators.h"

namespace davinci {
namespace {

Operator kMm("aclnnMm");
Operator kRmsNorm("aclnnRmsNorm");
Operator kKvRmsNormRopeCache("aclnnKvRmsNormRopeCache");
Operator kInterleaveRope("aclnnInterleaveRope");
Operator kTransposeBatchMatMul("aclnnTransposeBatchMatMul");

constexpr std::array<int64_t, 3> kAsGiven = {0, 1, 2};
constexpr std::array<int64_t, 3> kSwapLeading = {1, 0, 2};

// out = permute_out(permute_x(x) times weight), batch by batch.
void multiply_heads(Stage& stage, const View& x, const std::array<int64_t, 3>& permute_x,
                    const Tensor& weight, const View& out) {
  constexpr int32_t kOneSplit = 1;
  stage.run(kTransposeBatchMatMul, x, weight, nullptr, nullptr, at::IntArrayRef(permute_x),
            at::IntArrayRef(kAsGiven), at::IntArrayRef(kSwapLeading), kKeepDtype, kOneSplit, out);
}

// Sizes of the stage, read from its weights.
struct LatentSizes {
  int64_t tokens, decode_tokens, heads, latent, rope, nope, query_rank;

  LatentSizes(const Tensor& hidden_states, const Tensor& a_weight, const OptionalTensor& q_a_norm,
              const Tensor& q_b_weight, const Tensor& kv_a_norm, const Tensor& up_key,
              const Tensor& latent_cache, const Tensor& rotary_cache, int64_t num_decode_tokens)
      : tokens(hidden_states.size(0)),
        decode_tokens(num_decode_tokens),
        heads(up_key.size(0)),
        latent(kv_a_norm.size(0)),
        rope(rotary_cache.size(-1)),
        nope(up_key.size(1)),
        query_rank(q_a_norm.has_value() ? q_a_norm->size(0) : 0) {
    const int64_t into_queries = query_rank > 0 ? query_rank : hidden_states.size(1);
    TORCH_CHECK_VALUE(hidden_states.dim() == 2 && a_weight.dim() == 2 &&
                          a_weight.size(0) == hidden_states.size(1) &&
                          a_weight.size(1) == query_rank + latent + rope,
                      "hidden states of sizes ", hidden_states.sizes(), " and a_weight of sizes ",
                      a_weight.sizes(), ": give [tokens, hidden] and [hidden, ",
                      query_rank + latent + rope,
                      "] (rank of the queries, latent and rotary part)");
    TORCH_CHECK_VALUE(q_b_weight.dim() == 2 && q_b_weight.size(0) == into_queries &&
                          q_b_weight.size(1) == heads * (nope + rope),
                      "q_b_weight of sizes ", q_b_weight.sizes(), ": give [", into_queries, ", ",
                      heads * (nope + rope), "] for ", heads, " heads of ", nope, " + ", rope);
    TORCH_CHECK_VALUE(
        up_key.dim() == 3 && up_key.size(2) == latent && latent_cache.size(-1) == latent,
        "up_key of sizes ", up_key.sizes(), " and a latent cache of sizes ", latent_cache.sizes(),
        ": both end in the latent size, ", latent);
    TORCH_CHECK_VALUE(decode_tokens >= 0 && decode_tokens <= tokens, decode_tokens,
                      " decode tokens among ", tokens);
  }
  bool has_prefill() const { return decode_tokens < tokens; }
};

}  // namespace

LatentQueries npu::mla_preprocess(const Tensor& hidden_states, const Tensor& a_weight,
                                  const OptionalTensor& q_a_norm, const Tensor& q_b_weight,
                                  const Tensor& kv_a_norm, const Tensor& up_key, const Tensor& cos,
                                  const Tensor& sin, const Tensor& slot_mapping,
                                  const Tensor& latent_cache, const Tensor& rotary_cache,
                                  double q_epsilon, double kv_epsilon, int64_t num_decode_tokens,
                                  const std::optional<c10::Stream>& side_stream) {
  const LatentSizes s(hidden_states, a_weight, q_a_norm, q_b_weight, kv_a_norm, up_key,
                      latent_cache, rotary_cache, num_decode_tokens);
  const at::ScalarType dtype = hidden_states.scalar_type();
  Stage stage("mla_preprocess", hidden_states);
  void* const side = side_stream ? Stage::handle(*side_stream) : nullptr;

  Tensor absorbed, q, latent, k_rope;  // undefined (None) where the step has no such tokens
  Tensor q_rope = empty({s.tokens, s.heads, s.rope}, dtype, hidden_states);
  if (s.decode_tokens > 0)
    absorbed = empty({s.decode_tokens, s.heads, s.latent}, dtype, hidden_states);
  const int64_t query_row = s.heads * (s.nope + s.rope);
  const int64_t kv_row = s.latent + s.rope;
  const bool has_rank = s.query_rank > 0;
  const Scratch scratch(hidden_states, {
                                           // down projections; one product where they are one
                                           {dtype, {s.tokens, s.query_rank + kv_row}},
                                           {dtype, {s.tokens, s.query_rank}},  // normed
                                           {at::kFloat, {s.tokens, has_rank ? 1 : 0}},
                                           {dtype, {s.has_prefill() ? 0 : s.tokens, query_row}},
                                           {dtype, {s.has_prefill() ? 0 : s.tokens, s.latent}},
                                           {dtype, {s.has_prefill() ? 0 : s.tokens, s.rope}},
                                       });
  View queries = scratch[3];
  View latent_rows = scratch[4];
  View rope_rows = scratch[5];
  if (s.has_prefill()) {
    q = empty({s.tokens, s.heads, s.nope + s.rope}, dtype, hidden_states);
    latent = empty({s.tokens, s.latent}, dtype, hidden_states);
    k_rope = empty({s.tokens, s.rope}, dtype, hidden_states);
    queries = View::of(q).reshaped({s.tokens, query_row});
    latent_rows = View::of(latent);
    rope_rows = View::of(k_rope);
  }

  // With a side stream the down projections are two products, so that the key-value path can run
  // beside the query path.
  View down_q = scratch[0].narrowed(1, 0, s.query_rank);
  View down_kv = scratch[0].narrowed(1, s.query_rank, kv_row);
  const View weight = View::of(a_weight);
  const auto project_kv = [&] {
    stage.run(kMm, hidden_states, weight.narrowed(1, s.query_rank, kv_row), down_kv, kKeepDtype);
  };
  const auto write_cache = [&] {
    constexpr bool kReturnsRows = true;
    stage.run(kKvRmsNormRopeCache, down_kv.unsqueezed(1).unsqueezed(1), kv_a_norm, cos, sin,
              slot_mapping, rotary_cache, latent_cache, nullptr, nullptr, nullptr, nullptr,
              kv_epsilon, "PA_BNSD", s.has_prefill() ? kReturnsRows : !kReturnsRows,
              rope_rows.reshaped({s.tokens, 1, 1, s.rope}),
              latent_rows.reshaped({s.tokens, 1, 1, s.latent}));
  };
  const auto normalize_queries = [&] {
    if (has_rank) stage.run(kRmsNorm, down_q, *q_a_norm, q_epsilon, scratch[1], scratch[2]);
  };
  const auto project_queries = [&] {
    stage.run(kMm, has_rank ? scratch[1] : View::of(hidden_states), q_b_weight, queries,
              kKeepDtype);
  };
  const View heads = queries.split_last(s.heads, s.nope + s.rope);
  const auto rotate_queries = [&] {
    stage.run(kInterleaveRope, heads.narrowed(2, s.nope, s.rope).unsqueezed(2), cos, sin,
              View::of(q_rope).unsqueezed(2));
  };
  const auto absorb = [&] {
    if (s.decode_tokens == 0) return;
    multiply_heads(stage, heads.narrowed(0, 0, s.decode_tokens).narrowed(2, 0, s.nope),
                   kSwapLeading, up_key, View::of(absorbed));
  };

  if (side == nullptr) {
    stage.run(kMm, hidden_states, a_weight, scratch[0], kKeepDtype);
    normalize_queries();
    project_queries();
    write_cache();
    rotate_queries();
    absorb();
  } else {
    // Matrix products keep to one at a time; norms, rotations and the cache write run beside them.
    if (has_rank)
      stage.run(kMm, hidden_states, weight.narrowed(1, 0, s.query_rank), down_q, kKeepDtype);
    stage.let_wait(side);
    stage.use(side);
    project_kv();
    stage.use_own();
    normalize_queries();
    stage.use(side);
    stage.let_wait(stage.own_stream());
    write_cache();
    stage.use_own();
    project_queries();
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

LatentQueries meta::mla_preprocess(const Tensor& hidden_states, const Tensor& a_weight,
                                   const OptionalTensor& q_a_norm, const Tensor& q_b_weight,
                                   const Tensor& kv_a_norm, const Tensor& up_key, const Tensor&,
                                   const Tensor&, const Tensor&, const Tensor& latent_cache,
                                   const Tensor& rotary_cache, double, double,
                                   int64_t num_decode_tokens, const std::optional<c10::Stream>&) {
  const LatentSizes s(hidden_states, a_weight, q_a_norm, q_b_weight, kv_a_norm, up_key,
                      latent_cache, rotary_cache, num_decode_tokens);
  const at::ScalarType dtype = hidden_states.scalar_type();
  const auto made = [&](bool exists, at::IntArrayRef sizes) {
    return exists ? empty(sizes, dtype, hidden_states) : Tensor();
  };
  return {made(s.decode_tokens > 0, {s.decode_tokens, s.heads, s.latent}),
          made(true, {s.tokens, s.heads, s.rope}),
          made(s.has_prefill(), {s.tokens, s.heads, s.nope + s.rope}),
          made(s.has_prefill(), {s.tokens, s.latent}), made(s.has_prefill(), {s.tokens, s.rope})};
}

namespace {

void check_decode(const Tensor& absorbed, const Tensor& q_rope, const Tensor& latent_cache,
                  const Tensor& rotary_cache, const Tensor& up_value) {
  TORCH_CHECK_VALUE(absorbed.dim() == 3 && q_rope.dim() == 3 && latent_cache.dim() == 4 &&
                        rotary_cache.dim() == 4 && up_value.dim() == 3 &&
                        q_rope.size(0) == absorbed.size(0) && q_rope.size(1) == absorbed.size(1) &&
                        up_value.size(0) == absorbed.size(1) &&
                        up_value.size(1) == absorbed.size(2),
                    "absorbed queries of sizes ", absorbed.sizes(), ", rotary ones of sizes ",
                    q_rope.sizes(), " and up_value of sizes ", up_value.sizes(),
                    ": give [tokens, heads, latent], [tokens, heads, rope] and [heads, latent, "
                    "value]");
}

}  // namespace

Tensor npu::mla_decode_attention(const Tensor& absorbed, const Tensor& q_rope,
                                 const Tensor& latent_cache, const Tensor& rotary_cache,
                                 const Tensor& block_table, at::IntArrayRef query_ends,
                                 at::IntArrayRef seq_lens, const OptionalTensor& mask,
                                 const Tensor& up_value, double scale) {
  check_decode(absorbed, q_rope, latent_cache, rotary_cache, up_value);
  const int64_t tokens = absorbed.size(0);
  const int64_t heads = absorbed.size(1);
  const at::ScalarType dtype = absorbed.scalar_type();
  Stage stage("mla_decode_attention", absorbed);
  Tensor out = empty({tokens, heads * up_value.size(2)}, dtype, absorbed);
  const Scratch scratch(absorbed, {{dtype, {heads, tokens, absorbed.size(2)}}, {at::kFloat, {0}}});
  const View latent = View::of(latent_cache)
                          .reshaped({latent_cache.size(0), latent_cache.size(1),
                                     latent_cache.size(2) * latent_cache.size(3)});
  const View rotary = View::of(rotary_cache)
                          .reshaped({rotary_cache.size(0), rotary_cache.size(1),
                                     rotary_cache.size(2) * rotary_cache.size(3)});
  run_attention(stage, {.query = View::of(absorbed),
                        .key = latent,
                        .value = latent,
                        .query_rope = View::of(q_rope),
                        .key_rope = rotary,
                        .mask = mask,
                        .block_table = block_table,
                        .query_ends = query_ends,
                        .key_lengths = seq_lens,
                        .heads = heads,
                        .key_value_heads = 1,
                        .scale = scale,
                        .layout = "TND_NTD",
                        .sparse_mode = mask.has_value() ? kCausal : kEveryKey,
                        .block_size = latent_cache.size(1),
                        .out = scratch[0],
                        .lse = scratch[1]});
  multiply_heads(stage, scratch[0], kAsGiven, up_value,
                 View::of(out).split_last(heads, up_value.size(2)));
  stage.submit();
  return out;
}

Tensor meta::mla_decode_attention(const Tensor& absorbed, const Tensor& q_rope,
                                  const Tensor& latent_cache, const Tensor& rotary_cache,
                                  const Tensor&, at::IntArrayRef, at::IntArrayRef,
                                  const OptionalTensor&, const Tensor& up_value, double) {
  check_decode(absorbed, q_rope, latent_cache, rotary_cache, up_value);
  return empty({absorbed.size(0), absorbed.size(1) * up_value.size(2)}, absorbed.scalar_type(),
               absorbed);
}

}  // namespace davinci
