// Rotary position embedding of query and key from a table of cosines and sines.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {
namespace {

Operator kRopeWithSinCosCache("aclnnRopeWithSinCosCache");

void check(const Tensor& positions, const Tensor& query, const Tensor& key,
           const Tensor& cos_sin_cache, int64_t head_size) {
  TORCH_CHECK_VALUE(positions.dim() == 1 && query.dim() == 2 && key.dim() == 2 &&
                        query.size(0) == positions.size(0) && key.size(0) == positions.size(0),
                    "positions of sizes ", positions.sizes(), ", a query of sizes ", query.sizes(),
                    " and a key of sizes ", key.sizes(),
                    ": give [num_tokens], [num_tokens, num_heads * head_size] and [num_tokens, "
                    "num_kv_heads * head_size]");
  TORCH_CHECK_VALUE(head_size > 0 && query.size(1) % head_size == 0 && key.size(1) % head_size == 0,
                    "rows of ", query.size(1), " and ", key.size(1),
                    " entries do not hold heads of ", head_size);
  TORCH_CHECK_VALUE(cos_sin_cache.dim() == 2 && cos_sin_cache.size(1) <= head_size,
                    "a table of sizes ", cos_sin_cache.sizes(), " for heads of ", head_size,
                    ": give [max_position, rotary_dim] with rotary_dim at most head_size");
}

}  // namespace

std::tuple<Tensor, Tensor> npu::rotary_embedding(const Tensor& positions, const Tensor& query,
                                                 const Tensor& key, const Tensor& cos_sin_cache,
                                                 int64_t head_size, bool is_neox_style) {
  check(positions, query, key, cos_sin_cache, head_size);
  Stage stage("rotary_embedding", query);
  Tensor query_out = empty(query.sizes(), query.scalar_type(), query);
  Tensor key_out = empty(key.sizes(), key.scalar_type(), key);
  // No sections: one position per token.
  const std::array<int64_t, 3> sections = {0, 0, 0};
  stage.run(kRopeWithSinCosCache, positions, query, key, cos_sin_cache, at::IntArrayRef(sections),
            head_size, is_neox_style, query_out, key_out);
  stage.submit();
  return {query_out, key_out};
}

std::tuple<Tensor, Tensor> meta::rotary_embedding(const Tensor& positions, const Tensor& query,
                                                  const Tensor& key, const Tensor& cos_sin_cache,
                                                  int64_t head_size, bool) {
  check(positions, query, key, cos_sin_cache, head_size);
  return {empty(query.sizes(), query.scalar_type(), query),
          empty(key.sizes(), key.scalar_type(), key)};
}

}  // namespace davinci
