// aclnnFusedInferAttentionScore and its predecessors for prefill and decode: attention over keys
// and values that are dense, packed one sequence after the other, or paged.

#include <limits>

#include "ops/attention/declarations.h"
#include "ops/attention/fused_attention.h"

namespace vnpu::ops {
namespace {

// One scale tensor for keys and values, [2, ...], is an older form of two.
FusedAttention prepared(FusedAttention call, const OptionalTensor& scale_of_both,
                        const OptionalTensor& offset_of_both, int64_t mode_of_both,
                        bool int8_products, const OptionalTensor& lse) {
  // The products of int8 queries and keys are rescaled between the two matrix products on the
  // device.
  if (int8_products) {
    refuse(
        "attention between int8 queries, keys and values (deqScale1, quantScale1, deqScale2) is "
        "not supported; quantize only the keys and values.");
  }
  if (!call.key_scale && scale_of_both && scale_of_both->numel() > 0) {
    require(scale_of_both->size(0) == 2, "antiquantScale is [2, ...]: for keys and for values.");
    call.key_scale = scale_of_both->select(0, 0);
    call.value_scale = scale_of_both->select(0, 1);
    if (offset_of_both && offset_of_both->numel() > 0) {
      call.key_offset = offset_of_both->select(0, 0);
      call.value_offset = offset_of_both->select(0, 1);
    }
    call.key_quant_mode = call.value_quant_mode = mode_of_both;
  }
  call.lse = lse;
  return call;
}

}  // namespace

// The arguments that all versions begin with, those that they end with, and what is made of them.
#define VNPU_FUSED_INFER_INPUTS                                                                    \
  const Tensor &query, const TensorList &key, const TensorList &value, const OptionalTensor &bias, \
      const OptionalTensor &mask, const OptionalIntArray &query_lengths,                           \
      const OptionalIntArray &key_lengths, const OptionalTensor &dequant_scores,                   \
      const OptionalTensor &quant_weights, const OptionalTensor &dequant_values,                   \
      const OptionalTensor &out_scale, const OptionalTensor &out_offset,                           \
      const OptionalTensor &scale_of_both, const OptionalTensor &offset_of_both,                   \
      const OptionalTensor &block_table, const OptionalTensor &query_padding,                      \
      const OptionalTensor &key_padding, const OptionalTensor &key_scale,                          \
      const OptionalTensor &key_offset, const OptionalTensor &value_scale,                         \
      const OptionalTensor &value_offset, const OptionalTensor &key_prefix,                        \
      const OptionalTensor &value_prefix, const OptionalIntArray &prefix_length
#define VNPU_FUSED_INFER_ATTRIBUTES                                                               \
  int64_t query_heads, double scale, int64_t pre_tokens, int64_t next_tokens, const Text &layout, \
      int64_t key_heads, int64_t sparse_mode, [[maybe_unused]] int64_t inner_precise,             \
      int64_t block_size, int64_t mode_of_both, bool wants_lse, int64_t key_mode,                 \
      int64_t value_mode

#define VNPU_FUSED_INFER_CALL                                                                 \
  prepared({query,        key,           value,       query_heads,                            \
            key_heads,    scale,         layout,      {sparse_mode, pre_tokens, next_tokens}, \
            out.tensor,   bias,          mask,        query_lengths,                          \
            key_lengths,  out_scale,     out_offset,  block_table,                            \
            block_size,   query_padding, key_padding, {},                                     \
            key_scale,    key_offset,    value_scale, value_offset,                           \
            key_mode,     value_mode,    key_prefix,  value_prefix,                           \
            prefix_length},                                                                   \
           scale_of_both, offset_of_both, mode_of_both,                                       \
           dequant_scores || quant_weights || dequant_values,                                 \
           wants_lse ? lse.tensor : OptionalTensor())

VNPU_OPERATOR(FusedInferAttentionScoreV2,
              (VNPU_FUSED_INFER_INPUTS, VNPU_FUSED_INFER_ATTRIBUTES, Out out, OptionalOut lse),
              {.tier = kT2,
               .cost = attend_with_lengths,
               .allowed = allowed_fused_infer_attention_score_v2}) {
  run(VNPU_FUSED_INFER_CALL);
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV2)

VNPU_OPERATOR(
    FusedInferAttentionScoreV3,
    (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope, const OptionalTensor& key_rope,
     const OptionalTensor&, VNPU_FUSED_INFER_ATTRIBUTES, Out out, OptionalOut lse),
    {.tier = kT2, .cost = attend_with_lengths, .allowed = allowed_fused_infer_attention_score_v3}) {
  FusedAttention call = VNPU_FUSED_INFER_CALL;
  call.query_rope = query_rope;
  call.key_rope = key_rope;
  run(std::move(call));
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV3)

VNPU_OPERATOR(
    FusedInferAttentionScoreV4,
    (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope, const OptionalTensor& key_rope,
     const OptionalTensor&, const OptionalTensor& query_scale, const OptionalTensor& sink,
     VNPU_FUSED_INFER_ATTRIBUTES, int64_t, Out out, OptionalOut lse),
    {.tier = kT2, .cost = attend_with_lengths, .allowed = allowed_fused_infer_attention_score_v4}) {
  FusedAttention call = VNPU_FUSED_INFER_CALL;
  call.query_rope = query_rope;
  call.key_rope = key_rope;
  call.query_scale = query_scale;
  call.sink = sink;
  run(std::move(call));
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV4)

VNPU_OPERATOR(
    FusedInferAttentionScoreV5,
    (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope, const OptionalTensor& key_rope,
     const OptionalTensor&, const OptionalTensor& query_scale, const OptionalTensor& sink,
     const OptionalIntArray&, const OptionalIntArray&, VNPU_FUSED_INFER_ATTRIBUTES, int64_t,
     int64_t, Out out, OptionalOut lse),
    {.tier = kT2, .cost = attend_with_lengths, .allowed = allowed_fused_infer_attention_score_v4}) {
  FusedAttention call = VNPU_FUSED_INFER_CALL;
  call.query_rope = query_rope;
  call.key_rope = key_rope;
  call.query_scale = query_scale;
  call.sink = sink;
  run(std::move(call));
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV5)

VNPU_OPERATOR(PromptFlashAttentionV3,
              (const Tensor& query, const Tensor& key, const Tensor& value,
               const OptionalTensor& bias, const OptionalTensor& mask,
               const OptionalIntArray& query_lengths, const OptionalIntArray& key_lengths,
               const OptionalTensor& dequant_scores, const OptionalTensor& quant_weights,
               const OptionalTensor& dequant_values, const OptionalTensor& out_scale,
               const OptionalTensor& out_offset, int64_t query_heads, double scale,
               int64_t pre_tokens, int64_t next_tokens, const Text& layout, int64_t key_heads,
               int64_t sparse_mode, int64_t, Out out),
              {.tier = kT2, .cost = attend_with_lengths}) {
  const TensorList keys{key};
  const TensorList values{value};
  run(prepared({query,
                keys,
                values,
                query_heads,
                key_heads,
                scale,
                layout,
                {sparse_mode, pre_tokens, next_tokens},
                out.tensor,
                bias,
                mask,
                query_lengths,
                key_lengths,
                out_scale,
                out_offset},
               {}, {}, 0, dequant_scores || quant_weights || dequant_values, {}));
}

VNPU_OPERATOR(IncreFlashAttentionV4,
              (const Tensor& query, const TensorList& key, const TensorList& value,
               const OptionalTensor& bias, const OptionalTensor& mask,
               const OptionalIntArray& key_lengths, const OptionalTensor& dequant_scores,
               const OptionalTensor& quant_weights, const OptionalTensor& dequant_values,
               const OptionalTensor& out_scale, const OptionalTensor& out_offset,
               const OptionalTensor& scale_of_both, const OptionalTensor& offset_of_both,
               const OptionalTensor& block_table, const OptionalTensor& key_padding,
               int64_t query_heads, double scale, const Text& layout, int64_t key_heads,
               int64_t block_size, int64_t, Out out),
              {.tier = kT2, .cost = attend_with_lengths}) {
  constexpr int64_t kAll = std::numeric_limits<int32_t>::max();
  FusedAttention call{query,       key,       value,           query_heads, key_heads,
                      scale,       layout,    {0, kAll, kAll}, out.tensor,  bias,
                      mask,        {},        key_lengths,     out_scale,   out_offset,
                      block_table, block_size};
  call.key_padding = key_padding;
  // One scale pair without a mode: per channel, or one for all.
  run(prepared(std::move(call), scale_of_both, offset_of_both, 0,
               dequant_scores || quant_weights || dequant_values, {}));
}

}  // namespace vnpu::ops
