// Attention over paged caches and over the batch itself.

#include "operators/fused_attention.h"

#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

Operator kFusedInferAttentionScore("aclnnFusedInferAttentionScoreV3");
Operator kScatterPaKvCache("aclnnScatterPaKvCache");

void check_rows(const Tensor& query, const Tensor& key, const Tensor& value) {
  TORCH_CHECK_VALUE(query.dim() == 3 && key.dim() == 3 && value.dim() == 3 &&
                        key.size(0) == value.size(0) && key.size(1) == value.size(1) &&
                        key.size(1) > 0 && query.size(1) % key.size(1) == 0,
                    "a query of sizes ", query.sizes(), ", a key of sizes ", key.sizes(),
                    " and a value of sizes ", value.sizes(),
                    ": give [tokens, heads, head_size] and [tokens, kv_heads, head_size], with "
                    "heads a multiple of kv_heads");
}

void check_paged(const arguments::paged_attention& a) {
  TORCH_CHECK_VALUE(a.key_cache.dim() == 4 && a.value_cache.dim() == 4 &&
                        a.key_cache.sizes().slice(0, 3) == a.value_cache.sizes().slice(0, 3),
                    "caches of sizes ", a.key_cache.sizes(), " and ", a.value_cache.sizes(),
                    ": give [blocks, block_size, kv_heads, head_size] both");
  TORCH_CHECK_VALUE(a.key.has_value() == a.value.has_value(),
                    "one of key and value is missing: give both, or neither when the cache holds "
                    "this step's tokens already");
  if (a.key.has_value()) check_rows(a.query, *a.key, *a.value);
  TORCH_CHECK_VALUE(a.query.dim() == 3 && a.out.sizes() == a.query.sizes(), "an output of sizes ",
                    a.out.sizes(), " for a query of sizes ", a.query.sizes(),
                    ": give [tokens, heads, head_size] both");
}

}  // namespace

PreparedAttention::PreparedAttention(Handles& handles, const FusedAttention& call)
    : query(handles.tensor(call.query)),
      key(handles.tensor_list({call.key})),
      value(handles.tensor_list({call.value})),
      query_rope(Argument<std::optional<View>>::c(handles, call.query_rope)),
      key_rope(Argument<std::optional<View>>::c(handles, call.key_rope)),
      mask(Argument<OptionalTensor>::c(handles, call.mask)),
      block_table(Argument<OptionalTensor>::c(handles, call.block_table)),
      out(handles.tensor(call.out)),
      lse(handles.tensor(call.lse)),
      heads(call.heads),
      key_value_heads(call.key_value_heads),
      scale(call.scale),
      layout(call.layout),
      sparse_mode(call.sparse_mode),
      pre_tokens(call.pre_tokens),
      next_tokens(call.next_tokens),
      block_size(call.block_size),
      wants_lse(call.wants_lse) {}

void run_attention(Stage& stage, const FusedAttention& call) {
  Handles& handles = stage.handles();
  run_attention(stage, PreparedAttention(handles, call), handles.ints(call.actual_seq_lengths_q),
                handles.ints(call.actual_seq_lengths_kv));
}

void run_attention(Stage& stage, const PreparedAttention& call, aclIntArray* actual_seq_lengths_q,
                   aclIntArray* actual_seq_lengths_kv) {
  constexpr int64_t kHighPrecision = 0;
  constexpr int64_t kNoAntiquant = 0;
  stage.run(kFusedInferAttentionScore, call.query, call.key, call.value, nullptr, call.mask,
            actual_seq_lengths_q, actual_seq_lengths_kv, nullptr, nullptr, nullptr, nullptr,
            nullptr, nullptr, nullptr, call.block_table, nullptr, nullptr, nullptr, nullptr,
            nullptr, nullptr, nullptr, nullptr, nullptr, call.query_rope, call.key_rope, nullptr,
            call.heads, call.scale, call.pre_tokens, call.next_tokens, call.layout,
            call.key_value_heads, call.sparse_mode, kHighPrecision, call.block_size, kNoAntiquant,
            call.wants_lse, kNoAntiquant, kNoAntiquant, call.out, call.lse);
}

void paged_attention(const arguments::paged_attention& a) {
  check_paged(a);
  if (a.query.is_meta()) return;
  Stage stage("paged_attention", a.query);
  const auto copied = [](const OptionalTensor& rows) {
    return rows.has_value() && !rows->is_contiguous() ? rows->sizes().vec()
                                                      : std::vector<int64_t>{0};
  };
  const at::ScalarType dtype = a.query.scalar_type();
  const Scratch scratch(a.query,
                        {{at::kFloat, {0}}, {dtype, copied(a.key)}, {dtype, copied(a.value)}});
  if (a.key.has_value()) {
    TORCH_CHECK_VALUE(a.slot_mapping.has_value(),
                      "keys without slot_mapping: give [tokens], where each goes in the cache");
    constexpr std::array<int64_t, 2> kSteps = {1, 1};
    constexpr std::array<int64_t, 2> kNoOffsets = {0, 0};
    // The cache write does not support strided rows, such as the parts of a joint projection.
    const auto contiguous = [&](const Tensor& rows, const View& copy) {
      if (rows.is_contiguous()) return View::of(rows);
      stage.run(kInplaceCopy, copy, rows);
      return copy;
    };
    const View key = contiguous(*a.key, scratch[1]);
    const View value = contiguous(*a.value, scratch[2]);
    stage.run(kScatterPaKvCache, key, a.key_cache, *a.slot_mapping, value, a.value_cache, nullptr,
              nullptr, nullptr, "Norm", "None", at::IntArrayRef(kSteps),
              at::IntArrayRef(kNoOffsets));
  }
  run_attention(stage, {.query = View::of(a.query),
                        .key = flat(a.key_cache),
                        .value = flat(a.value_cache),
                        .query_rope = {},
                        .key_rope = {},
                        .mask = a.mask,
                        .block_table = a.block_table,
                        .actual_seq_lengths_q = a.actual_seq_lengths_q,
                        .actual_seq_lengths_kv = a.seq_lens,
                        .heads = a.query.size(1),
                        .key_value_heads = a.key_cache.size(2),
                        .scale = a.scale,
                        .sparse_mode = a.sparse_mode,
                        .pre_tokens = a.pre_tokens,
                        .next_tokens = a.next_tokens,
                        .block_size = a.key_cache.size(1),
                        .out = View::of(a.out),
                        .lse = scratch[0]});
  stage.submit();
}

Tensors<2> prefill_attention(const arguments::prefill_attention& a) {
  check_rows(a.query, a.key, a.value);
  const int64_t tokens = a.query.size(0);
  const int64_t heads = a.query.size(1);
  Tensor out = empty({tokens, heads, a.value.size(2)}, a.query.scalar_type(), a.query);
  Tensor lse;
  if (a.returns_lse) lse = empty({tokens, heads, 1}, at::kFloat, a.query);
  if (a.query.is_meta()) return {out, lse};
  const auto view = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? std::optional<View>(View::of(*tensor)) : std::nullopt;
  };
  Stage stage("prefill_attention", a.query);
  run_attention(stage,
                {.query = View::of(a.query),
                 .key = View::of(a.key),
                 .value = View::of(a.value),
                 .query_rope = view(a.query_rope),
                 .key_rope = view(a.key_rope),
                 .mask = a.mask,
                 .block_table = {},
                 .actual_seq_lengths_q = a.actual_seq_lengths_q,
                 .actual_seq_lengths_kv = a.actual_seq_lengths_kv,
                 .heads = heads,
                 .key_value_heads = a.key.size(1),
                 .scale = a.scale,
                 .sparse_mode = a.sparse_mode,
                 .pre_tokens = a.pre_tokens,
                 .next_tokens = a.next_tokens,
                 .wants_lse = a.returns_lse,
                 .out = View::of(out),
                 .lse = a.returns_lse ? View::of(lse) : View::over(nullptr, at::kFloat, {0})});
  stage.submit();
  return {out, lse};
}

}  // namespace davinci
