// Attention over paged caches and over the batch itself.

#include "operators/fused_attention.h"

#include "operators/operators.h"

namespace davinci {
namespace {

Operator kFusedInferAttentionScore("aclnnFusedInferAttentionScoreV3");
Operator kScatterPaKvCache("aclnnScatterPaKvCache");

// [blocks, block_size, heads, size] as [blocks, block_size, heads * size].
View flat(const Tensor& cache) {
  return View::of(cache).reshaped({cache.size(0), cache.size(1), cache.size(2) * cache.size(3)});
}

void check_rows(const Tensor& query, const Tensor& key, const Tensor& value) {
  TORCH_CHECK_VALUE(query.dim() == 3 && key.dim() == 3 && value.dim() == 3 &&
                        key.size(0) == value.size(0) && key.size(1) == value.size(1) &&
                        key.size(1) > 0 && query.size(1) % key.size(1) == 0,
                    "a query of sizes ", query.sizes(), ", a key of sizes ", key.sizes(),
                    " and a value of sizes ", value.sizes(),
                    ": give [tokens, heads, head_size] and [tokens, kv_heads, head_size], with "
                    "heads a multiple of kv_heads");
}

void check_paged(const Tensor& query, const OptionalTensor& key, const OptionalTensor& value,
                 const Tensor& key_cache, const Tensor& value_cache, const Tensor& out) {
  TORCH_CHECK_VALUE(key_cache.dim() == 4 && value_cache.dim() == 4 &&
                        key_cache.sizes().slice(0, 3) == value_cache.sizes().slice(0, 3),
                    "caches of sizes ", key_cache.sizes(), " and ", value_cache.sizes(),
                    ": give [blocks, block_size, kv_heads, head_size] both");
  TORCH_CHECK_VALUE(key.has_value() == value.has_value(),
                    "one of key and value is missing: give both, or neither when the cache holds "
                    "this step's tokens already");
  if (key.has_value()) check_rows(query, *key, *value);
  TORCH_CHECK_VALUE(query.dim() == 3 && out.sizes() == query.sizes(), "an output of sizes ",
                    out.sizes(), " for a query of sizes ", query.sizes(),
                    ": give [tokens, heads, head_size] both");
}

}  // namespace

void run_attention(Stage& stage, const FusedAttention& call) {
  constexpr int64_t kHighPrecision = 0;
  constexpr int64_t kNoAntiquant = 0;
  stage.run(kFusedInferAttentionScore, call.query, Views{{call.key}}, Views{{call.value}}, nullptr,
            call.mask, call.query_ends, call.key_lengths, nullptr, nullptr, nullptr, nullptr,
            nullptr, nullptr, nullptr, call.block_table, nullptr, nullptr, nullptr, nullptr,
            nullptr, nullptr, nullptr, nullptr, nullptr, call.query_rope, call.key_rope, nullptr,
            call.heads, call.scale, call.pre_tokens, call.next_tokens, call.layout,
            call.key_value_heads, call.sparse_mode, kHighPrecision, call.block_size, kNoAntiquant,
            call.wants_lse, kNoAntiquant, kNoAntiquant, call.out, call.lse);
}

void npu::paged_attention(const Tensor& query, const OptionalTensor& key,
                          const OptionalTensor& value, const Tensor& key_cache,
                          const Tensor& value_cache, const OptionalTensor& slot_mapping,
                          const Tensor& block_table, at::IntArrayRef query_ends,
                          at::IntArrayRef seq_lens, const OptionalTensor& mask, double scale,
                          int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,
                          const Tensor& out) {
  check_paged(query, key, value, key_cache, value_cache, out);
  Stage stage("paged_attention", query);
  if (key.has_value()) {
    TORCH_CHECK_VALUE(slot_mapping.has_value(),
                      "keys without slot_mapping: give [tokens], where each goes in the cache");
    constexpr std::array<int64_t, 2> kSteps = {1, 1};
    constexpr std::array<int64_t, 2> kNoOffsets = {0, 0};
    stage.run(kScatterPaKvCache, *key, key_cache, *slot_mapping, *value, value_cache, nullptr,
              nullptr, nullptr, "Norm", "None", at::IntArrayRef(kSteps),
              at::IntArrayRef(kNoOffsets));
  }
  const Scratch scratch(query, {{at::kFloat, {0}}});
  run_attention(stage, {.query = View::of(query),
                        .key = flat(key_cache),
                        .value = flat(value_cache),
                        .query_rope = {},
                        .key_rope = {},
                        .mask = mask,
                        .block_table = block_table,
                        .query_ends = query_ends,
                        .key_lengths = seq_lens,
                        .heads = query.size(1),
                        .key_value_heads = key_cache.size(2),
                        .scale = scale,
                        .sparse_mode = sparse_mode,
                        .pre_tokens = pre_tokens,
                        .next_tokens = next_tokens,
                        .block_size = key_cache.size(1),
                        .out = View::of(out),
                        .lse = scratch[0]});
  stage.submit();
}

void meta::paged_attention(const Tensor& query, const OptionalTensor& key,
                           const OptionalTensor& value, const Tensor& key_cache,
                           const Tensor& value_cache, const OptionalTensor&, const Tensor&,
                           at::IntArrayRef, at::IntArrayRef, const OptionalTensor&, double, int64_t,
                           int64_t, int64_t, const Tensor& out) {
  check_paged(query, key, value, key_cache, value_cache, out);
}

std::tuple<Tensor, Tensor> npu::prefill_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& query_rope,
    const OptionalTensor& key_rope, at::IntArrayRef query_ends, at::IntArrayRef key_ends,
    const OptionalTensor& mask, double scale, int64_t sparse_mode, int64_t pre_tokens,
    int64_t next_tokens, bool returns_lse) {
  check_rows(query, key, value);
  const auto view = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? std::optional<View>(View::of(*tensor)) : std::nullopt;
  };
  Stage stage("prefill_attention", query);
  Tensor out = empty({query.size(0), query.size(1), value.size(2)}, query.scalar_type(), query);
  Tensor lse;
  View lse_view = View::over(nullptr, at::kFloat, {0});
  if (returns_lse) {
    lse = empty({query.size(0), query.size(1), 1}, at::kFloat, query);
    lse_view = View::of(lse);
  }
  run_attention(stage, {.query = View::of(query),
                        .key = View::of(key),
                        .value = View::of(value),
                        .query_rope = view(query_rope),
                        .key_rope = view(key_rope),
                        .mask = mask,
                        .block_table = {},
                        .query_ends = query_ends,
                        .key_lengths = key_ends,
                        .heads = query.size(1),
                        .key_value_heads = key.size(1),
                        .scale = scale,
                        .sparse_mode = sparse_mode,
                        .pre_tokens = pre_tokens,
                        .next_tokens = next_tokens,
                        .wants_lse = returns_lse,
                        .out = View::of(out),
                        .lse = lse_view});
  stage.submit();
  return {out, lse};
}

std::tuple<Tensor, Tensor> meta::prefill_attention(const Tensor& query, const Tensor& key,
                                                   const Tensor& value, const OptionalTensor&,
                                                   const OptionalTensor&, at::IntArrayRef,
                                                   at::IntArrayRef, const OptionalTensor&, double,
                                                   int64_t, int64_t, int64_t, bool returns_lse) {
  check_rows(query, key, value);
  return {empty({query.size(0), query.size(1), value.size(2)}, query.scalar_type(), query),
          returns_lse ? empty({query.size(0), query.size(1), 1}, at::kFloat, query) : Tensor()};
}

}  // namespace davinci
