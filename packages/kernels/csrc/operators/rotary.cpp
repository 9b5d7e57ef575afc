// Rotary position embedding of query and key from a table of cosines and sines.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {
namespace {

Operator kRopeWithSinCosCache("aclnnRopeWithSinCosCache");

void check(const arguments::rotary_embedding& a) {
  TORCH_CHECK_VALUE(a.positions.dim() == 1 && a.query.dim() == 2 && a.key.dim() == 2 &&
                        a.query.size(0) == a.positions.size(0) &&
                        a.key.size(0) == a.positions.size(0),
                    "positions of sizes ", a.positions.sizes(), ", a query of sizes ",
                    a.query.sizes(), " and a key of sizes ", a.key.sizes(),
                    ": give [num_tokens], [num_tokens, num_heads * head_size] and [num_tokens, "
                    "num_kv_heads * head_size]");
  TORCH_CHECK_VALUE(
      a.head_size > 0 && a.query.size(1) % a.head_size == 0 && a.key.size(1) % a.head_size == 0,
      "rows of ", a.query.size(1), " and ", a.key.size(1), " entries do not hold heads of ",
      a.head_size);
  TORCH_CHECK_VALUE(a.cos_sin_cache.dim() == 2 && a.cos_sin_cache.size(1) <= a.head_size,
                    "a table of sizes ", a.cos_sin_cache.sizes(), " for heads of ", a.head_size,
                    ": give [max_position, rotary_dim] with rotary_dim at most head_size");
}

}  // namespace

Tensors<2> rotary_embedding(const arguments::rotary_embedding& a) {
  check(a);
  Tensor query_out = empty(a.query.sizes(), a.query.scalar_type(), a.query);
  Tensor key_out = empty(a.key.sizes(), a.key.scalar_type(), a.key);
  if (a.query.is_meta()) return {query_out, key_out};
  Stage stage("rotary_embedding", a.query);
  // No sections: one position per token.
  const std::array<int64_t, 3> sections = {0, 0, 0};
  stage.run(kRopeWithSinCosCache, a.positions, a.query, a.key, a.cos_sin_cache,
            at::IntArrayRef(sections), a.head_size, a.is_neox_style, query_out, key_out);
  stage.submit();
  return {query_out, key_out};
}

}  // namespace davinci
