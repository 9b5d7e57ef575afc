// MLA of decodes, over the cache itself.

#include "launch/stage.h"
#include "operators/fused_attention.h"
#include "operators/heads_product.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

void check(const arguments::mla_decode_attention& a) {
  TORCH_CHECK_VALUE(
      a.ql_nope.dim() == 3 && a.q_pe.dim() == 3 && a.kv_c_cache.dim() == 4 &&
          a.k_pe_cache.dim() == 4 && a.W_UV.dim() == 3 && a.q_pe.size(0) == a.ql_nope.size(0) &&
          a.q_pe.size(1) == a.ql_nope.size(1) && a.W_UV.size(0) == a.ql_nope.size(1) &&
          a.W_UV.size(1) == a.ql_nope.size(2),
      "ql_nope of sizes ", a.ql_nope.sizes(), ", q_pe of sizes ", a.q_pe.sizes(),
      " and W_UV of sizes ", a.W_UV.sizes(),
      ": give [tokens, heads, kv_lora_rank], [tokens, heads, rope] and [heads, kv_lora_rank, "
      "value]");
}

}  // namespace

Tensor mla_decode_attention(const arguments::mla_decode_attention& a) {
  check(a);
  const int64_t tokens = a.ql_nope.size(0);
  const int64_t heads = a.ql_nope.size(1);
  const int64_t value_size = a.W_UV.size(2);
  const at::ScalarType dtype = a.ql_nope.scalar_type();
  Tensor out = empty({tokens, heads * value_size}, dtype, a.ql_nope);
  if (a.ql_nope.is_meta()) return out;
  Stage stage("mla_decode_attention", a.ql_nope);
  const Scratch scratch(a.ql_nope,
                        {{dtype, {heads, tokens, a.ql_nope.size(2)}}, {at::kFloat, {0}}});
  const View kv_c = flat(a.kv_c_cache);
  run_attention(stage, {.query = View::of(a.ql_nope),
                        .key = kv_c,
                        .value = kv_c,
                        .query_rope = View::of(a.q_pe),
                        .key_rope = flat(a.k_pe_cache),
                        .mask = a.mask,
                        .block_table = a.block_table,
                        .actual_seq_lengths_q = a.actual_seq_lengths_q,
                        .actual_seq_lengths_kv = a.seq_lens,
                        .heads = heads,
                        .key_value_heads = 1,
                        .scale = a.scale,
                        .layout = "TND_NTD",
                        .sparse_mode = a.mask.has_value() ? kCausal : kEveryKey,
                        .block_size = a.kv_c_cache.size(1),
                        .out = scratch[0],
                        .lse = scratch[1]});
  multiply_heads(stage, scratch[0], kAsGiven, a.W_UV, View::of(out).split_last(heads, value_size));
  stage.submit();
  return out;
}

}  // namespace davinci
