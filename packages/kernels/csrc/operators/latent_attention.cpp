// Multi-head latent attention of decodes, over the latent cache.

#include "launch/stage.h"
#include "operators/fused_attention.h"
#include "operators/heads_product.h"
#include "operators/operators.h"

namespace davinci {
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
