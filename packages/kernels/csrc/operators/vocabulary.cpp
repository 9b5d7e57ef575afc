// Embedding rows divided over tensor-parallel ranks: a rank looks up the tokens that are its own
// and gives zeros for the others, so that the sum over ranks is the embedding.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {
namespace {

Operator kSubs("aclnnSubs");
Operator kLtScalar("aclnnLtScalar");
Operator kGeScalar("aclnnGeScalar");
Operator kInplaceLogicalOr("aclnnInplaceLogicalOr");
Operator kInplaceMaskedFill("aclnnInplaceMaskedFillScalar");
Operator kEmbedding("aclnnEmbedding");

using Integer = Number<int64_t>;

void check(const Tensor& token_ids, const Tensor& weight, int64_t num_rows) {
  TORCH_CHECK_TYPE(token_ids.scalar_type() == at::kInt || token_ids.scalar_type() == at::kLong,
                   "token ids of ", token_ids.scalar_type(), ": give int32 or int64");
  TORCH_CHECK_VALUE(num_rows > 0, "a share of ", num_rows, " rows: every rank has at least one");
  TORCH_CHECK_VALUE(token_ids.dim() == 1 && weight.dim() == 2 && weight.size(0) >= num_rows,
                    "token ids of sizes ", token_ids.sizes(), " and a weight of sizes ",
                    weight.sizes(), ": give [num_tokens] and at least [", num_rows,
                    ", embedding_dim]");
}

// rows[t] = token - first_row, or 0 where the token is foreign.
void mask(Stage& stage, const Tensor& token_ids, int64_t first_row, int64_t num_rows,
          const View& rows, const View& is_foreign, const View& is_behind) {
  stage.run(kSubs, token_ids, Integer{first_row}, Integer{1}, rows);
  stage.run(kLtScalar, rows, Integer{0}, is_foreign);
  stage.run(kGeScalar, rows, Integer{num_rows}, is_behind);
  stage.run(kInplaceLogicalOr, is_foreign, is_behind);
  stage.run(kInplaceMaskedFill, rows, is_foreign, Integer{0});
}

}  // namespace

namespace npu {

Tensor vocab_parallel_embedding(const Tensor& token_ids, const Tensor& weight, int64_t first_row,
                                int64_t num_rows) {
  check(token_ids, weight, num_rows);
  Stage stage("vocab_parallel_embedding", weight);
  const int64_t num_tokens = token_ids.size(0);
  Tensor partial = empty({num_tokens, weight.size(1)}, weight.scalar_type(), weight);
  const Scratch scratch(weight, {{token_ids.scalar_type(), {num_tokens}},
                                 {at::kBool, {num_tokens}},
                                 {at::kBool, {num_tokens}}});
  mask(stage, token_ids, first_row, num_rows, scratch[0], scratch[1], scratch[2]);
  stage.run(kEmbedding, weight, scratch[0], partial);
  stage.run(kInplaceMaskedFill, partial, scratch[1].unsqueezed(-1), Integer{0});
  stage.submit();
  return partial;
}

}  // namespace npu

namespace meta {

Tensor vocab_parallel_embedding(const Tensor& token_ids, const Tensor& weight, int64_t,
                                int64_t num_rows) {
  check(token_ids, weight, num_rows);
  return empty({token_ids.size(0), weight.size(1)}, weight.scalar_type(), weight);
}

}  // namespace meta
}  // namespace davinci
