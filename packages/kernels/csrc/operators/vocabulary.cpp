// Embedding rows divided over tensor-parallel ranks: a rank looks up the tokens that are its own
// and gives zeros for the others, so that the sum over ranks is the embedding.

#include "launch/stage.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

Operator kSubs("aclnnSubs");
Operator kLtScalar("aclnnLtScalar");
Operator kGeScalar("aclnnGeScalar");
Operator kInplaceLogicalOr("aclnnInplaceLogicalOr");
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

// rows[t] = token - first_row, or 0 for a token of another rank.
void mask(Stage& stage, const Tensor& token_ids, int64_t first_row, int64_t num_rows,
          const View& rows, const View& is_foreign, const View& is_after) {
  stage.run(kSubs, token_ids, Integer{first_row}, Integer{1}, rows);
  stage.run(kLtScalar, rows, Integer{0}, is_foreign);
  stage.run(kGeScalar, rows, Integer{num_rows}, is_after);
  stage.run(kInplaceLogicalOr, is_foreign, is_after);
  stage.run(kInplaceMaskedFill, rows, is_foreign, Integer{0});
}

}  // namespace

Tensor vocab_parallel_embedding(const arguments::vocab_parallel_embedding& a) {
  check(a.token_ids, a.weight, a.num_rows);
  const int64_t num_tokens = a.token_ids.size(0);
  Tensor partial = empty({num_tokens, a.weight.size(1)}, a.weight.scalar_type(), a.weight);
  if (a.weight.is_meta()) return partial;
  Stage stage("vocab_parallel_embedding", a.weight);
  const Scratch scratch(a.weight, {{a.token_ids.scalar_type(), {num_tokens}},
                                   {at::kBool, {num_tokens}},
                                   {at::kBool, {num_tokens}}});
  mask(stage, a.token_ids, a.first_row, a.num_rows, scratch[0], scratch[1], scratch[2]);
  stage.run(kEmbedding, a.weight, scratch[0], partial);
  stage.run(kInplaceMaskedFill, partial, scratch[1].unsqueezed(-1), Integer{0});
  stage.submit();
  return partial;
}

}  // namespace davinci
