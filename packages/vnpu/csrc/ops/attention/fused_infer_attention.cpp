// aclnnFusedInferAttentionScore: attention over keys and values that are dense, packed one sequence
// after the other, or paged.

#include <algorithm>

#include "ops/attention/fused_attention.h"
#include "ops/rule_text.h"

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

// What later versions add.
struct Additions {
  OptionalTensor query_rope, key_rope, query_scale, sink;
};
void run(FusedAttention call, const Additions& more) {
  call.query_rope = more.query_rope;
  call.key_rope = more.key_rope;
  call.query_scale = more.query_scale;
  call.sink = more.sink;
  run(std::move(call));
}

}  // namespace

// The arguments that begin and end all versions, and their conversion to a call.
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

constexpr char kDocument[] = "aclnnFusedInferAttentionScoreV4.md, parameters";
constexpr char kPacked[] = "aclnnFusedInferAttentionScoreV4.md, constraints of TND";
constexpr char kPaged[] = "aclnnFusedInferAttentionScoreV4.md, PagedAttention";
constexpr char kMla[] = "aclnnFusedInferAttentionScoreV4.md, MLA";
constexpr char kMasks[] = "aclnnFusedInferAttentionScoreV4.md, sparseMode";
constexpr int64_t kMaskSide = 2048;
static Condition packed() { return equals("layout", "TND", "NTD", "TND_NTD", "NTD_TND"); }
// Entries of one head, whatever the layout; 0 if they cannot be determined.
static int64_t head_size_of(const TensorView& view, const std::string& layout, int64_t heads) {
  const std::string input = layout.substr(0, layout.find('_'));
  const int64_t last = size_of(view, -1);
  if (!input.empty() && input.back() == 'H') return heads > 0 ? last / heads : 0;
  return last;
}
// Keys or values: dense as the layout says, or paged [blocks, block, heads * size],
// [blocks, heads, block, size] or [blocks, heads, size / 16, block, 16].
static int64_t key_size_of(const TensorView& view, const std::string& layout, int64_t heads,
                           bool paged) {
  if (!paged) return head_size_of(view, layout, heads);
  if (view.dims == 3) return heads > 0 ? size_of(view, -1) / heads : 0;
  if (view.dims == 5) return size_of(view, 2) * size_of(view, 4);
  return size_of(view, -1);
}
static std::vector<int64_t> lengths_of(const std::vector<int64_t>& ends) {
  std::vector<int64_t> lengths(ends.size());
  for (size_t i = 0; i < ends.size(); ++i) lengths[i] = ends[i] - (i == 0 ? 0 : ends[i - 1]);
  return lengths;
}
namespace {
struct Sizes {
  int64_t query, key, value, query_heads, key_heads;
  bool paged;
};
}  // namespace
// names: query, key, value, layout, query_heads, key_heads, block_table
static Sizes sizes_of_call(const RuleArguments& own) {
  Sizes s{};
  s.query_heads = own.integer(4);
  s.key_heads = own.integer(5) == 0 ? s.query_heads : own.integer(5);
  s.paged = given(own, 6);
  const std::string& layout = own.text(3);
  s.query = head_size_of(own.tensor(0), layout, s.query_heads);
  s.key = key_size_of(own.tensor(1), layout, s.key_heads, s.paged);
  s.value = key_size_of(own.tensor(2), layout, s.key_heads, s.paged);
  return s;
}
// A rule about the sizes of heads. allowed: whether they can be computed
static Check head_sizes(std::string rule, std::function<bool(const Sizes&)> allowed) {
  Check check =
      that(std::move(rule), {"key", "value", "layout", "query_heads", "key_heads", "block_table"},
           [allowed = std::move(allowed)](const RuleArguments& own) {
             if (!own.has(1) || !own.has(2) || !has_packed_tokens(own.text(3))) {
               return true;
             }
             const Sizes s = sizes_of_call(own);
             return s.query == 512 || allowed(s);
           });
  check.sees_absence = true;  // of the block table
  return check;
}
static bool equal_to(const Sizes& s, int64_t size) {
  return s.query == size && s.key == size && s.value == size;
}
static Check blocks_up_to(int64_t most) {
  return that("be a multiple of 16, at most " + text(most), {},
              [most](const RuleArguments& own) {
                return own.integer() > 0 && own.integer() % 16 == 0 && own.integer() <= most;
              })
      .when(is_given("block_table"));
}
// with_rope: for versions of the operator that take queryRope and keyRope
static std::vector<Rule> attention_rules(bool with_rope) {
  // Rules of sizes for calls without rope; with it they have their own.
  const auto alone = [with_rope](Check check) {
    return with_rope ? std::move(check).when(is_missing("query_rope")) : check;
  };
  const std::vector<Rule> all{
      {"query",
       {dtype({at::kHalf, at::kBFloat16, at::kChar}),
        that("have heads of at most 512 entries, a multiple of 16", {"layout", "query_heads"},
             [](const RuleArguments& own) {
               const int64_t size = head_size_of(own.tensor(), own.text(1), own.integer(2));
               return size <= 512 && size % 16 == 0;
             })}},
      {"key",
       that("be float16 or bfloat16 as query, or int8 or int4 beside their scales", {"query"},
            [](const RuleArguments& own) {
              const ScalarType type = own.tensor().dtype;
              return type == own.tensor(1).dtype || type == at::kChar || type == at::kInt ||
                     type == at::ScalarType::QUInt4x2;
            })},
      {"value", same_dtype("key")},
      {"layout", one_of("BSH", "BSND", "BNSD", "TND", "NTD", "BSH_BNSD", "BNSD_BSND", "BSND_BNSD",
                        "NTD_TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD")},
      {"query_heads", between(1, 256)},
      {"key_heads",
       {between(0, 256), fits("divide queryHeads", {"query_heads"},
                              [](const RuleArguments& own) {
                                const int64_t heads = own.integer();
                                return heads == 0 || (heads > 0 && own.integer(1) % heads == 0);
                              })}},
      {"key_heads",
       alone(that("have at most 64 query heads for each of its own", {"query_heads"},
                  [](const RuleArguments& own) {
                    const int64_t heads = own.integer();
                    return heads <= 0 || own.integer(1) <= 64 * heads;
                  })),
       "op-plugin torch_npu-npu_fused_infer_attention_score.md, num_key_value_heads; MLA has up to "
       "128: CheckFeatureMlaNoQuantShape in fused_infer_attention_score_tiling_check_feature.cpp, "
       "and the limit in incre_flash_attention_tiling_check.cpp holds without queryRope",
       {.until = CannRelease::k8_5}},

      // --- masks
      {"mask", dtype({at::kBool, at::kChar, at::kByte}), kMasks},
      {"mask",
       when(equals("sparse_mode", 2, 3, 4),
            {present(), that("end in [2048, 2048]", {},
                             [](const RuleArguments& own) {
                               const TensorView& mask = own.tensor();
                               return size_of(mask, -1) == kMaskSide &&
                                      size_of(mask, -2) == kMaskSide &&
                                      mask.numel() == kMaskSide * kMaskSide;
                             })}),
       kMasks},
      {"mask",
       absent().when(both(packed(), equals("sparse_mode", 0))),
       "\"When Layout is TND/NTD_TND and PA enabled, sparseMode = 0, not support attentionMask\", "
       "prompt_flash_attention_tiling.cpp",
       {.tiling = true}},
      {"sparse_mode", one_of(0, 1, 2, 3, 4), kMasks},
      {"sparse_mode",
       one_of(0, 3, 4).when(packed()),
       "\"When Layout is TND/NTD_TND and PA enabled, sparseMode only support 0 or 3 or 4\", "
       "prompt_flash_attention_tiling.cpp",
       {.tiling = true}},
      {"pre_tokens",
       fits("not be below -nextTokens", {"next_tokens", "sparse_mode"},
            [](const RuleArguments& own) {
              return own.integer(2) != 4 || own.integer() + own.integer(1) >= 0;
            }),
       kMasks},
      {"pre_tokens, next_tokens", between(-2147483648LL, 2147483647LL)},

      // --- lengths
      {"query_lengths", present().when(packed()), kPacked},
      {"key_lengths",
       when(packed(), {present(), fits("have an entry for each request", {"query_lengths"},
                                       [](const RuleArguments& own) {
                                         return own.integers().size() == own.integers(1).size();
                                       })}),
       kPacked},
      {"key_lengths", present().when(is_given("block_table")), kPaged},
      {"query_lengths",
       fits("grow from request to request and end with the tokens of query", {"query", "layout"},
            [](const RuleArguments& own) {
              const std::vector<int64_t>& ends = own.integers();
              const int64_t tokens = tokens_of(own.tensor(1), own.text(2));
              const bool grows = std::is_sorted(ends.begin(), ends.end());
              return !ends.empty() && grows && ends.front() >= 0 && ends.back() == tokens;
            })
           .when(packed()),
       "CheckActSeqWhenLayoutIsTND in prompt_flash_attention_tiling.cpp"},
      {"key_lengths",
       fits("grow from request to request and end with the tokens of key", {"key", "layout"},
            [](const RuleArguments& own) {
              const std::vector<int64_t>& ends = own.integers();
              const int64_t tokens = tokens_of(own.tensor(1), own.text(2));
              return !ends.empty() && std::is_sorted(ends.begin(), ends.end()) &&
                     ends.back() == tokens;
            })
           .when(both(packed(), is_missing("block_table"))),
       kPacked},
      {"query_lengths",
       fits("give no request more queries than keys", {"key_lengths", "block_table"},
            [](const RuleArguments& own) -> Found {
              const std::vector<int64_t> queries = lengths_of(own.integers());
              if (!own.has(1)) return std::nullopt;
              const std::vector<int64_t> keys =
                  given(own, 2) ? own.integers(1) : lengths_of(own.integers(1));
              for (size_t i = 0; i < std::min(queries.size(), keys.size()); ++i) {
                if (queries[i] > keys[i]) {
                  return text(queries[i]) + " queries over " + text(keys[i]) + " keys in request " +
                         text(static_cast<int64_t>(i));
                }
              }
              return std::nullopt;
            })
           .when(both(packed(), equals("sparse_mode", 3))),
       kPacked},
      {"query_lengths",
       that("have at most 4096 entries", {},
            [](const RuleArguments& own) { return own.integers().size() <= 4096; })
           .when(packed()),
       "MAX_VAR_LEN_SEQ_LEN in prompt_flash_attention_tiling.cpp",
       {.tiling = true}},

      // --- paged keys and values
      {"block_table",
       {dtype({at::kInt}), dims(2, 2),
        fits("have a row for each request", {"key_lengths"},
             [](const RuleArguments& own) {
               const auto requests = static_cast<int64_t>(own.integers(1).size());
               return size_of(own.tensor(), 0) == requests;
             }),
        fits("have a column for each block of the longest request", {"key_lengths", "block_size"},
             [](const RuleArguments& own) {
               int64_t longest = 0;
               for (const int64_t length : own.integers(1)) longest = std::max(longest, length);
               const int64_t size = std::max<int64_t>(1, own.integer(2));
               return size_of(own.tensor(), 1) >= (longest + size - 1) / size;
             })},
       kPaged},
      {"block_size", blocks_up_to(512), kPaged, {.until = CannRelease::k8_5}},
      {"block_size", blocks_up_to(1024), kPaged, {.since = CannRelease::k9_0}},
      {"key",
       when(is_given("block_table"),
            {fits("have blocks of blockSize tokens", {"block_size"},
                  [](const RuleArguments& own) {
                    const TensorView& key = own.tensor();
                    const int64_t tokens = size_of(key, key.dims == 3 ? 1 : -2);
                    return tokens == own.integer(1);
                  }),
             that("have rows of at most 65535 entries in [blocks, block, heads * size]", {},
                  [](const RuleArguments& own) {
                    const TensorView& key = own.tensor();
                    return key.dims != 3 || size_of(key, 2) <= 65535;
                  })}),
       kPaged},
      {"block_table",
       alone(absent().when(packed())),
       "aclnnFusedInferAttentionScoreV3.md of 8.5.0.alpha001: TND of heads other than 512 takes no "
       "PagedAttention",
       {.until = CannRelease::k8_3, .tiling = true}},
      {"query",
       alone(dtype({at::kBFloat16}).when(packed())),
       "aclnnFusedInferAttentionScoreV3.md of 8.5.0.alpha001: TND takes bfloat16 only",
       {.until = CannRelease::k8_3, .tiling = true}},

      // --- sizes of heads
      {"query",
       alone(head_sizes("have equal head sizes of 64 or 128, or 192 with values of 128, or equal "
                        "ones of 192 with as many key heads that are not paged",
                        [](const Sizes& s) {
                          return equal_to(s, 64) || equal_to(s, 128) ||
                                 (s.query == 192 && s.key == 192 &&
                                  (s.value == 128 ||
                                   (s.value == 192 && s.query_heads == s.key_heads && !s.paged)));
                        })),
       "CheckInputShapeWhenLayoutIsTND in prompt_flash_attention_tiling.cpp and the routes before "
       "it",
       {.until = CannRelease::k8_5, .tiling = true}},
      {"query",
       alone(head_sizes("have equal head sizes of 64 or 128, or 192 with values of 128, or equal "
                        "ones up to 256 with fewer key heads than query heads",
                        [](const Sizes& s) {
                          return equal_to(s, 64) || equal_to(s, 128) ||
                                 (s.query == 192 && s.key == 192 && s.value == 128) ||
                                 (s.query == s.key && s.key == s.value && s.query <= 256 &&
                                  s.key_heads < s.query_heads);
                        })),
       kPacked,
       {.since = CannRelease::k9_0, .tiling = true}},
      {"inner_precise", one_of(0, 1, 2, 3)},
      {"inner_precise",
       that("be 0 with fewer key heads than query heads", {"query_heads", "key_heads"},
            [](const RuleArguments& own) {
              const int64_t heads = own.integer(2);
              return heads == 0 || heads == own.integer(1) || own.integer() == 0;
            })
           .when(packed()),
       "aclnnFusedInferAttentionScoreV4.md of 9.0, constraints of TND",
       {.tiling = true}},

      // --- results
      {"out", same_dtype("query").when(has_dtype("query", {at::kBFloat16}))},
      {"lse", when(equals("wants_lse", 1), {present(), dtype({at::kFloat})})},
      {"lse", fits("be [tokens, heads, 1]", {"query", "query_heads", "layout"},
                   [](const RuleArguments& own) {
                     const TensorView& lse = own.tensor();
                     const int64_t tokens = tokens_of(own.tensor(1), own.text(3));
                     return lse.dims == 3 && lse.sizes[0] == tokens &&
                            lse.sizes[1] == own.integer(2) && lse.sizes[2] == 1;
                   })
                  .when(both(packed(), equals("wants_lse", 1)))}};
  if (!with_rope) return all;
  const auto compressed = [] {
    return Condition{"the heads of query have 512 entries",
                     {"query", "layout", "query_heads"},
                     [](const RuleArguments& own) {
                       return head_size_of(own.tensor(), own.text(1), own.integer(2)) == 512;
                     }};
  };
  const std::vector<Rule> rope{
      {"query_rope", present().when(is_given("key_rope")), kMla},
      {"key_rope", present().when(is_given("query_rope")), kMla},
      {"query_rope",
       {same_dtype("query"), fits("have the tokens and heads of query", {"query"},
                                  [](const RuleArguments& own) {
                                    const TensorView& rope_view = own.tensor();
                                    const TensorView& query = own.tensor(1);
                                    return rope_view.dims == query.dims && rope_view.dims >= 2 &&
                                           std::equal(rope_view.sizes,
                                                      rope_view.sizes + rope_view.dims - 1,
                                                      query.sizes);
                                  })},
       kMla},
      {"key_rope", same_dtype("key"), kMla},
      {"query_rope", size_in(-1, {64}), kMla, {.tiling = true}},
      {"query",
       that("have equal head sizes of 128, or of 512 over the cache, beside queryRope",
            {"key", "value", "layout", "query_heads", "key_heads", "block_table", "query_rope"},
            [](const RuleArguments& own) {
              if (!given(own, 7) || !own.has(1) || !own.has(2)) return true;
              const Sizes s = sizes_of_call(own);
              return equal_to(s, 128) || equal_to(s, 512);
            }),
       kMla,
       {.tiling = true}},
      {"query_rope, block_table", present().when(compressed()), kMla, {.tiling = true}},
      {"key_heads", one_of(1).when(compressed()), kMla, {.tiling = true}},
      {"query_heads",
       one_of(1, 2, 4, 8, 16, 32, 64, 128).when(compressed()),
       kMla,
       {.since = CannRelease::k8_5, .tiling = true}},
      {"query_heads",
       one_of(32, 64, 128).when(both(packed(), compressed())),
       "aclnnFusedInferAttentionScoreV3.md of 8.5.0.alpha001, MLA",
       {.until = CannRelease::k8_3, .tiling = true}},
      {"query_lengths",
       that("give no request more than 16 queries", {},
            [](const RuleArguments& own) -> Found {
              for (const int64_t length : lengths_of(own.integers())) {
                if (length > 16) return text(length) + " queries in one request";
              }
              return std::nullopt;
            })
           .when(both(packed(), compressed())),
       kMla,
       {.tiling = true}},

      // The page of 8.5 says so too, but that release's tiling check (CheckFeatureLse) accepts it,
      // and later pages have dropped the sentence.
      {"wants_lse",
       one_of(0).when(compressed()),
       kMla,
       {.until = CannRelease::k8_3, .tiling = true}},
      {"sparse_mode", one_of(0, 3, 4).when(compressed()), kMla, {.tiling = true}},
      {"query_lengths",
       that("give each request a single query under sparseMode 0", {"sparse_mode"},
            [](const RuleArguments& own) -> Found {
              if (own.integer(1) != 0) return std::nullopt;
              for (const int64_t length : lengths_of(own.integers())) {
                if (length > 1) return text(length) + " queries in one request";
              }
              return std::nullopt;
            })
           .when(both(packed(), compressed())),
       "op-plugin torch_npu-npu_fused_infer_attention_score.md, MLA",
       {.tiling = true}}};
  return joined(all, rope);
}
// The system's share and the partial results of a divided key axis.
constexpr Workspace kWorkspace{.bytes = 32 * kMiB, .copies = true};
static void attend_with_lengths(const Call& call, Work& work) {
  cost_of_attention(call, work, call.integers("query_lengths"), call.integers("key_lengths"));
}
VNPU_OPERATOR(FusedInferAttentionScoreV2,
              (VNPU_FUSED_INFER_INPUTS, VNPU_FUSED_INFER_ATTRIBUTES, Out out, OptionalOut lse),
              {.tier = kT2,
               .cost = attend_with_lengths,
               .rules = {kDocument, attention_rules(false), kWorkspace, kBigChips}}) {
  run(VNPU_FUSED_INFER_CALL);
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV2)

VNPU_OPERATOR(FusedInferAttentionScoreV3,
              (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope,
               const OptionalTensor& key_rope, const OptionalTensor&, VNPU_FUSED_INFER_ATTRIBUTES,
               Out out, OptionalOut lse),
              {.tier = kT2,
               .cost = attend_with_lengths,
               .rules = {kDocument, attention_rules(true), kWorkspace, kBigChips}}) {
  run(VNPU_FUSED_INFER_CALL, {query_rope, key_rope, {}, {}});
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV3)

constexpr char kSinkCheck[] =
    "CheckLearnableSinkWhenLayoutIsTND in prompt_flash_attention_tiling.cpp";
// A score of each head that takes part in the softmax without a value.
static Rules rules_of_fused_infer_attention_score_v4() {
  return {kDocument,
          joined(attention_rules(true),
                 {{"sink", dtype({at::kBFloat16}),
                   "op-plugin torch_npu-npu_fused_infer_attention_score_v2.md, learnable_sink"},
                  {"sink",
                   {dims(1, 1), fits("have an entry for each head of query", {"query_heads"},
                                     [](const RuleArguments& own) {
                                       return own.tensor().numel() == own.integer(1);
                                     })},
                   kSinkCheck,
                   {.tiling = true}},
                  {"value",
                   that("have heads of 64 or 128 entries beside learnableSink",
                        {"key", "query", "layout", "query_heads", "key_heads", "block_table"},
                        [](const RuleArguments& own) {
                          const int64_t key_heads =
                              own.integer(5) == 0 ? own.integer(4) : own.integer(5);
                          const int64_t size =
                              key_size_of(own.tensor(), own.text(3), key_heads, given(own, 6));
                          return size == 64 || size == 128;
                        })
                       .when(both(packed(), is_given("sink"))),
                   kSinkCheck,
                   {.tiling = true}},
                  {"inner_precise",
                   one_of(0).when(both(packed(), is_given("sink"))),
                   "CheckFAISinglePara in fused_infer_attention_score_tiling.cpp",
                   {.tiling = true}}}),
          kWorkspace, kBigChips};
}
#define VNPU_FUSED_INFER_ADDITIONS                                                          \
  const OptionalTensor &query_rope, const OptionalTensor &key_rope, const OptionalTensor &, \
      const OptionalTensor &query_scale, const OptionalTensor &sink
VNPU_OPERATOR(FusedInferAttentionScoreV4,
              (VNPU_FUSED_INFER_INPUTS, VNPU_FUSED_INFER_ADDITIONS, VNPU_FUSED_INFER_ATTRIBUTES,
               int64_t, Out out, OptionalOut lse),
              {.tier = kT2,
               .cost = attend_with_lengths,
               .rules = rules_of_fused_infer_attention_score_v4()}) {
  run(VNPU_FUSED_INFER_CALL, {query_rope, key_rope, query_scale, sink});
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV4)

VNPU_OPERATOR(FusedInferAttentionScoreV5,
              (VNPU_FUSED_INFER_INPUTS, VNPU_FUSED_INFER_ADDITIONS, const OptionalIntArray&,
               const OptionalIntArray&, VNPU_FUSED_INFER_ATTRIBUTES, int64_t, int64_t, Out out,
               OptionalOut lse),
              {.tier = kT2,
               .cost = attend_with_lengths,
               .rules = rules_of_fused_infer_attention_score_v4()}) {
  run(VNPU_FUSED_INFER_CALL, {query_rope, key_rope, query_scale, sink});
}
VNPU_MAX_WORKSPACE(FusedInferAttentionScoreV5)

}  // namespace vnpu::ops
