#pragma once

// The functions behind op_table.inc, by family. Shapes and meaning: README.md and reference.py.
// Each checks what aclnn does not, launches on the current stream, and returns new tensors.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <tuple>
#include <vector>

namespace davinci {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
// absorbed, q_rope, q, latent, k_rope: see reference.mla_preprocess.
using LatentQueries = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The same functions twice: on the NPU, and on meta tensors, where only shapes are computed.
#define DAVINCI_DECLARE_OPERATORS                                                                  \
  /* norm.cpp */                                                                                   \
  Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon);                          \
  std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,                 \
                                          const Tensor& weight, double epsilon);                   \
  std::tuple<Tensor, Tensor, Tensor> add_rms_norm_dynamic_quant(                                   \
      const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon);              \
  std::tuple<Tensor, Tensor> add_rms_norm_quant(                                                   \
      const Tensor& x, const Tensor& residual, const Tensor& weight, const OptionalTensor& bias,   \
      const Tensor& scale, const Tensor& offset, double epsilon);                                  \
  /* rotary.cpp */                                                                                 \
  std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query,        \
                                              const Tensor& key, const Tensor& cos_sin_cache,      \
                                              int64_t head_size, bool is_neox_style);              \
  /* vocabulary.cpp */                                                                             \
  Tensor vocab_parallel_embedding(const Tensor& token_ids, const Tensor& weight,                   \
                                  int64_t first_row, int64_t num_rows);                            \
  /* kv_cache.cpp */                                                                               \
  void copy_kv_blocks(at::TensorList kv_caches, const Tensor& block_pairs);                        \
  /* fused_attention.cpp */                                                                        \
  void paged_attention(                                                                            \
      const Tensor& query, const OptionalTensor& key, const OptionalTensor& value,                 \
      const Tensor& key_cache, const Tensor& value_cache, const OptionalTensor& slot_mapping,      \
      const Tensor& block_table, at::IntArrayRef query_ends, at::IntArrayRef seq_lens,             \
      const OptionalTensor& mask, double scale, int64_t sparse_mode, int64_t pre_tokens,           \
      int64_t next_tokens, const Tensor& out);                                                     \
  std::tuple<Tensor, Tensor> prefill_attention(                                                    \
      const Tensor& query, const Tensor& key, const Tensor& value,                                 \
      const OptionalTensor& query_rope, const OptionalTensor& key_rope,                            \
      at::IntArrayRef query_ends, at::IntArrayRef key_ends, const OptionalTensor& mask,            \
      double scale, int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,                  \
      bool returns_lse);                                                                           \
  /* latent_preprocess.cpp */                                                                      \
  LatentQueries mla_preprocess(                                                                    \
      const Tensor& hidden_states, const Tensor& a_weight, const OptionalTensor& q_a_norm,         \
      const Tensor& q_b_weight, const Tensor& kv_a_norm, const Tensor& up_key, const Tensor& cos,  \
      const Tensor& sin, const Tensor& slot_mapping, const Tensor& latent_cache,                   \
      const Tensor& rotary_cache, double q_epsilon, double kv_epsilon, int64_t num_decode_tokens,  \
      const std::optional<c10::Stream>& side_stream);                                              \
  /* latent_preprocess_w8a8.cpp */                                                                 \
  LatentQueries mla_preprocess_w8a8(                                                               \
      const Tensor& hidden_states, const OptionalTensor& hidden_scale, const Tensor& a_weight,     \
      const Tensor& a_scale, const OptionalTensor& a_bias, const OptionalTensor& q_a_norm,         \
      const OptionalTensor& q_a_norm_bias, const OptionalTensor& q_input_scale,                    \
      const OptionalTensor& q_input_offset, const Tensor& q_b_weight, const Tensor& q_b_scale,     \
      const OptionalTensor& q_b_bias, const Tensor& kv_a_norm, const Tensor& up_key,               \
      const Tensor& cos, const Tensor& sin, const Tensor& slot_mapping,                            \
      const Tensor& latent_cache, const Tensor& rotary_cache, double q_epsilon, double kv_epsilon, \
      int64_t num_decode_tokens, const std::optional<c10::Stream>& side_stream);                   \
  /* latent_attention.cpp */                                                                       \
  Tensor mla_decode_attention(                                                                     \
      const Tensor& absorbed, const Tensor& q_rope, const Tensor& latent_cache,                    \
      const Tensor& rotary_cache, const Tensor& block_table, at::IntArrayRef query_ends,           \
      at::IntArrayRef seq_lens, const OptionalTensor& mask, const Tensor& up_value, double scale); \
  /* experts.cpp */                                                                                \
  Tensor experts(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids,              \
                 const Tensor& gate_up, const Tensor& down, int64_t first_expert,                  \
                 int64_t num_experts);                                                             \
  Tensor experts_w8a8(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids,         \
                      const Tensor& gate_up, const Tensor& gate_up_scale, const Tensor& down,      \
                      const Tensor& down_scale, int64_t first_expert, int64_t num_experts);        \
  Tensor routed_experts(const Tensor& x, const Tensor& router_logits,                              \
                        const OptionalTensor& correction_bias, const Tensor& gate_up,              \
                        const Tensor& down, int64_t top_k, int64_t num_groups,                     \
                        int64_t num_chosen_groups, bool is_sigmoid, double scaling_factor,         \
                        int64_t first_expert, int64_t num_experts);                                \
  Tensor routed_experts_w8a8(                                                                      \
      const Tensor& x, const Tensor& router_logits, const OptionalTensor& correction_bias,         \
      const Tensor& gate_up, const Tensor& gate_up_scale, const Tensor& down,                      \
      const Tensor& down_scale, int64_t top_k, int64_t num_groups, int64_t num_chosen_groups,      \
      bool is_sigmoid, double scaling_factor, int64_t first_expert, int64_t num_experts);

namespace npu {
DAVINCI_DECLARE_OPERATORS
}
namespace meta {
DAVINCI_DECLARE_OPERATORS
}
#undef DAVINCI_DECLARE_OPERATORS

}  // namespace davinci
