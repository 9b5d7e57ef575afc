// aclnnFlashAttentionScore in its versions: attention without a cache, as encoders use it. Dropout
// and gradients belong to training.

#include <algorithm>
#include <cctype>

#include "ops/attention/fused_attention.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

struct Flash {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  OptionalTensor bias, drop_mask, mask;
  OptionalIntArray query_ends, key_ends;
  double scale, keep_probability;
  int64_t pre_tokens, next_tokens, query_heads;
  std::string layout;
  int64_t sparse_mode, bias_type;
  OptionalTensor softmax_max, softmax_sum;
  Tensor out;
};

void flash(const Flash& flash) {
  if (flash.keep_probability != 1.0 || (flash.drop_mask && flash.drop_mask->numel() > 0)) {
    refuse("dropout (keepProb " + std::to_string(flash.keep_probability) + ") is not supported.");
  }
  // 0 scales before adding the bias, 1 after; others compute the bias from the positions.
  if (flash.bias_type != 0 && flash.bias_type != 1) {
    refuse("pseType " + std::to_string(flash.bias_type) + " is not supported; use 0 or 1.");
  }
  std::string layout = flash.layout;
  for (char& letter : layout) letter = static_cast<char>(std::toupper(letter));
  // The number of key heads is not stated: it follows from the sizes.
  const size_t heads_dimension = layout.find('N');
  const int64_t key_heads =
      heads_dimension != std::string::npos
          ? flash.key.size(static_cast<int64_t>(heads_dimension))
          : flash.key.size(-1) / std::max<int64_t>(1, flash.query.size(-1) /
                                                          std::max<int64_t>(1, flash.query_heads));
  const TensorList keys{flash.key};
  const TensorList values{flash.value};
  FusedAttention call{
      flash.query, keys,        values,    flash.query_heads,
      key_heads,   flash.scale, layout,    {flash.sparse_mode, flash.pre_tokens, flash.next_tokens},
      flash.out,   flash.bias,  flash.mask};
  if (layout == "TND") call.query_lengths = flash.query_ends, call.key_lengths = flash.key_ends;
  call.bias_factor = flash.bias_type == 1 ? flash.scale : 1.0;
  call.single_queries_bounded = true;
  call.softmax_max = flash.softmax_max;
  call.softmax_sum = flash.softmax_sum;
  run(std::move(call));
}

}  // namespace

#define VNPU_FLASH_MASKS                                                               \
  const OptionalTensor &bias, const OptionalTensor &drop_mask, const OptionalTensor &, \
      const OptionalTensor &mask
#define VNPU_FLASH_ATTRIBUTES                                                     \
  double scale, double keep_probability, int64_t pre_tokens, int64_t next_tokens, \
      int64_t query_heads, const Text &layout, int64_t, int64_t sparse_mode
#define VNPU_FLASH_OUTPUTS OptionalOut softmax_max, OptionalOut softmax_sum, OptionalOut, Out out
#define VNPU_FLASH(QUERY_ENDS, KEY_ENDS, BIAS_TYPE)                                               \
  Flash {                                                                                         \
    query, key, value, bias, drop_mask, mask, QUERY_ENDS, KEY_ENDS, scale, keep_probability,      \
        pre_tokens, next_tokens, query_heads, layout, sparse_mode, BIAS_TYPE, softmax_max.tensor, \
        softmax_sum.tensor, out.tensor                                                            \
  }

static void attend_with_ends(const Call& call, Work& work) {
  cost_of_attention(call, work, call.integers("query_ends"), call.integers("key_ends"));
}
// Entries of a head of an argument. own: the rule's argument, query, key, layout, query_heads
static int64_t entries_of_head(const RuleArguments& own, size_t index) {
  const int64_t last = size_of(own.tensor(index), -1);
  if (own.text(3).back() != 'H') return last;
  const int64_t query = size_of(own.tensor(1), -1) / own.integer(4);
  const int64_t key_heads = query == 0 ? 0 : size_of(own.tensor(2), -1) / query;
  return index == 1 || key_heads == 0 ? query : last / key_heads;
}
static Rules rules_of_flash_attention() {
  const std::vector<const char*> heads{"query", "key", "layout", "query_heads"};
  return {
      "ops-transformer attention/flash_attention_score: parameters in docs, AnalysisAxis and "
      "InputDtypeCheck in aclnn_flash_attention_score.cpp",
      {{"layout",
        {one_of("BSH", "SBH", "BSND", "BNSD"),
         fits("have a letter for each dimension of query", {"query"},
              [](const RuleArguments& own) {
                return own.text().size() == static_cast<size_t>(own.tensor(1).dims);
              })}},
       {"query_heads", between(1, 256)},
       {"query",
        {dtype(kFloats),
         that("have heads of at most 768 entries", heads,
              [](const RuleArguments& own) { return entries_of_head(own, 1) <= 768; })}},
       {"key",
        {same_dtype("query"), fits("have heads of the size of query's", heads,
                                   [](const RuleArguments& own) {
                                     return entries_of_head(own, 2) == entries_of_head(own, 1);
                                   })}},
       {"value",
        {same_dtype("query"), fits("have heads of at most the size of query's", heads,
                                   [](const RuleArguments& own) {
                                     return entries_of_head(own, 0) <= entries_of_head(own, 1);
                                   })}},
       {"bias", same_dtype("query")},
       {"drop_mask", dtype({at::kByte})},
       {"mask", dtype({at::kBool, at::kByte})},
       {"sparse_mode", one_of(0, 1, 2, 3, 4, 5, 6)},
       {"softmax_max, softmax_sum", {present(), dtype({at::kFloat})}},
       {"out", same_dtype("query")}},
      {},
      kBigChips};
}
VNPU_OPERATOR(FlashAttentionScore,
              (const Tensor& query, const Tensor& key, const Tensor& value, VNPU_FLASH_MASKS,
               const OptionalIntArray&, VNPU_FLASH_ATTRIBUTES, VNPU_FLASH_OUTPUTS),
              {.tier = kT2, .cost = attend_with_ends, .rules = rules_of_flash_attention()}) {
  flash(VNPU_FLASH({}, {}, 1));
}
VNPU_OPERATOR(FlashAttentionScoreV2,
              (const Tensor& query, const Tensor& key, const Tensor& value, VNPU_FLASH_MASKS,
               const OptionalIntArray&, const OptionalIntArray&, const OptionalIntArray&,
               VNPU_FLASH_ATTRIBUTES, int64_t bias_type, VNPU_FLASH_OUTPUTS),
              {.tier = kT2, .cost = attend_with_ends}) {
  flash(VNPU_FLASH({}, {}, bias_type));
}
VNPU_OPERATOR(FlashAttentionVarLenScore,
              (const Tensor& query, const Tensor& key, const Tensor& value, VNPU_FLASH_MASKS,
               const OptionalIntArray&, const OptionalIntArray& query_ends,
               const OptionalIntArray& key_ends, VNPU_FLASH_ATTRIBUTES, VNPU_FLASH_OUTPUTS),
              {.tier = kT2, .cost = attend_with_ends}) {
  flash(VNPU_FLASH(query_ends, key_ends, 1));
}
VNPU_OPERATOR(FlashAttentionVarLenScoreV2,
              (const Tensor& query, const Tensor& key, const Tensor& value, VNPU_FLASH_MASKS,
               const OptionalIntArray&, const OptionalIntArray& query_ends,
               const OptionalIntArray& key_ends, const OptionalIntArray&, const OptionalIntArray&,
               VNPU_FLASH_ATTRIBUTES, int64_t bias_type, VNPU_FLASH_OUTPUTS),
              {.tier = kT2, .cost = attend_with_ends}) {
  flash(VNPU_FLASH(query_ends, key_ends, bias_type));
}
// softmaxOutLayout says how the statistics lie; they are written by their own sizes [tokens, heads,
// 8].
VNPU_OPERATOR(FlashAttentionVarLenScoreV4,
              (const Tensor& query, const Tensor& key, const Tensor& value, VNPU_FLASH_MASKS,
               const OptionalIntArray&, const OptionalIntArray& query_ends,
               const OptionalIntArray& key_ends, VNPU_FLASH_ATTRIBUTES, const Text&,
               VNPU_FLASH_OUTPUTS),
              {.tier = kT2, .cost = attend_with_ends}) {
  flash(VNPU_FLASH(query_ends, key_ends, 1));
}

}  // namespace vnpu::ops
