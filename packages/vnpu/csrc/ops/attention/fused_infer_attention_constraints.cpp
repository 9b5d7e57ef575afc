// What the fused attention operator can be called with.
//
// Sources. Document: attention/fused_infer_attention_score/docs of ops-transformer, by release
// (v8.5.0, v9.0.0). Check: op_host of the same releases, attention/{fused_infer_attention_score,
// prompt_flash_attention}. Where the document of 8.5 is narrower than its check (TND in bfloat16
// only, no size of 64), the check decides, for it is what answers a call.

#include <algorithm>
#include <limits>

#include "ops/attention/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kDocument[] = "aclnnFusedInferAttentionScoreV4.md, parameters";
constexpr char kPacked[] = "aclnnFusedInferAttentionScoreV4.md, constraints of TND";
constexpr char kPaged[] = "aclnnFusedInferAttentionScoreV4.md, PagedAttention";
constexpr char kMla[] = "aclnnFusedInferAttentionScoreV4.md, MLA";
constexpr char kMasks[] = "aclnnFusedInferAttentionScoreV4.md, sparseMode";
constexpr char kSink[] =
    "op-plugin torch_npu-npu_fused_infer_attention_score_v2.md, learnable_sink";
constexpr char kSinkCheck[] =
    "CheckLearnableSinkWhenLayoutIsTND in prompt_flash_attention_tiling.cpp";
constexpr char kSizes[] =
    "CheckInputShapeWhenLayoutIsTND in prompt_flash_attention_tiling.cpp and the routes before it";

constexpr int64_t kMaskSide = 2048;

Condition packed() {
  return equals("layout", std::vector<std::string>{"TND", "NTD", "TND_NTD", "NTD_TND"});
}

bool is_packed(const std::string& layout) {
  return layout == "TND" || layout == "NTD" || layout == "TND_NTD" || layout == "NTD_TND";
}
bool tokens_first(const std::string& layout) { return layout.rfind("TND", 0) == 0; }

// Of a tensor of queries, or of keys that are not paged.
int64_t tokens_of(const TensorView& view, const std::string& layout) {
  return size_of(view, tokens_first(layout) ? 0 : 1);
}

// Entries of one head, whatever the layout; 0 where they cannot be told.
int64_t head_size_of(const TensorView& view, const std::string& layout, int64_t heads) {
  const std::string input = layout.substr(0, layout.find('_'));
  const int64_t last = size_of(view, -1);
  if (!input.empty() && input.back() == 'H') return heads > 0 ? last / heads : 0;
  return last;
}

// Keys or values: dense as the layout says, or paged [blocks, block, heads * size],
// [blocks, heads, block, size] or [blocks, heads, size / 16, block, 16].
int64_t key_size_of(const TensorView& view, const std::string& layout, int64_t heads, bool paged) {
  if (!paged) return head_size_of(view, layout, heads);
  if (view.dims == 3) return heads > 0 ? size_of(view, -1) / heads : 0;
  if (view.dims == 5) return size_of(view, 2) * size_of(view, 4);
  return size_of(view, -1);
}

std::vector<int64_t> lengths_of(const std::vector<int64_t>& ends) {
  std::vector<int64_t> lengths(ends.size());
  for (size_t i = 0; i < ends.size(); ++i) lengths[i] = ends[i] - (i == 0 ? 0 : ends[i - 1]);
  return lengths;
}

bool given(const RuleArguments& own, size_t index) {
  return own.has(index) && own.tensor(index).numel() > 0;
}

struct Sizes {
  int64_t query, key, value, query_heads, key_heads;
  bool paged;
};
// names: query, key, value, layout, query_heads, key_heads, block_table
Sizes sizes_of_call(const RuleArguments& own) {
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
std::string shown(const Sizes& s) {
  return "head sizes " + text(s.query) + " (query), " + text(s.key) + " (key), " + text(s.value) +
         " (value) with " + text(s.query_heads) + " heads over " + text(s.key_heads);
}
// A rule about the sizes of heads. allowed: whether they can be computed
Check head_sizes(std::string rule, std::function<bool(const Sizes&)> allowed) {
  Check check =
      that(std::move(rule), {"key", "value", "layout", "query_heads", "key_heads", "block_table"},
           [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
             if (!own.has(1) || !own.has(2) || !is_packed(own.text(3))) {
               return std::nullopt;
             }
             const Sizes s = sizes_of_call(own);
             if (s.query == 512 || allowed(s)) return std::nullopt;
             return shown(s);
           });
  check.sees_absence = true;  // of the block table
  return check;
}
bool equal_to(const Sizes& s, int64_t size) {
  return s.query == size && s.key == size && s.value == size;
}

// with_rope: for versions of the operator that take queryRope and keyRope
std::vector<Row> rows(bool with_rope) {
  // Rules of sizes for calls without rope; with it they have their own.
  const auto alone = [with_rope](Check check) {
    return with_rope ? std::move(check).when(is_missing("query_rope")) : check;
  };
  std::vector<Row> all{
      {"query", dtype({at::kHalf, at::kBFloat16, at::kChar}), kDocument},
      {"key",
       that("be float16 or bfloat16 as query, or int8 or int4 beside their scales", {"query"},
            [](const RuleArguments& own) -> Found {
              const ScalarType type = own.tensor().dtype;
              if (type == own.tensor(1).dtype || type == at::kChar || type == at::kInt ||
                  type == at::ScalarType::QUInt4x2) {
                return std::nullopt;
              }
              return "dtype " + name_of(type) + " beside a query of " +
                     name_of(own.tensor(1).dtype);
            }),
       kDocument},
      {"value", same_dtype("key"), kDocument},
      {"layout",
       one_of(std::vector<std::string>{"BSH", "BSND", "BNSD", "TND", "NTD", "BSH_BNSD", "BNSD_BSND",
                                       "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD",
                                       "TND_NTD"}),
       kDocument},
      {"query_heads", between(1, 256), kDocument},
      {"key_heads", between(0, 256), kDocument},
      {"key_heads",
       fits("divide queryHeads", {"query_heads"},
            [](const RuleArguments& own) -> Found {
              const int64_t heads = own.integer();
              if (heads == 0 || (heads > 0 && own.integer(1) % heads == 0)) return std::nullopt;
              return "value " + text(heads) + " beside " + text(own.integer(1)) + " query heads";
            }),
       kDocument},
      {"key_heads",
       alone(that("have at most 64 query heads for each of its own", {"query_heads"},
                  [](const RuleArguments& own) -> Found {
                    const int64_t heads = own.integer();
                    if (heads <= 0 || own.integer(1) <= 64 * heads) return std::nullopt;
                    return "value " + text(heads) + " beside " + text(own.integer(1)) +
                           " query heads";
                  })),
       "op-plugin torch_npu-npu_fused_infer_attention_score.md, num_key_value_heads; MLA has up to "
       "128: CheckFeatureMlaNoQuantShape in fused_infer_attention_score_tiling_check_feature.cpp, "
       "and the limit in incre_flash_attention_tiling_check.cpp holds without queryRope",
       {.until = CannRelease::k8_5}},
      {"query",
       that("have heads of at most 512 entries, a multiple of 16", {"layout", "query_heads"},
            [](const RuleArguments& own) -> Found {
              const int64_t size = head_size_of(own.tensor(), own.text(1), own.integer(2));
              if (size <= 512 && size % 16 == 0) return std::nullopt;
              return "heads of " + text(size) + " entries";
            }),
       kDocument},
      // --- masks
      {"mask", dtype({at::kBool, at::kChar, at::kByte}), kMasks},
      {"mask", present().when(equals("sparse_mode", std::vector<int64_t>{2, 3, 4})), kMasks},
      {"mask",
       that("end in [2048, 2048]", {},
            [](const RuleArguments& own) -> Found {
              const TensorView& mask = own.tensor();
              if (size_of(mask, -1) == kMaskSide && size_of(mask, -2) == kMaskSide &&
                  mask.numel() == kMaskSide * kMaskSide) {
                return std::nullopt;
              }
              return "sizes " + sizes_of(mask);
            })
           .when(equals("sparse_mode", std::vector<int64_t>{2, 3, 4})),
       kMasks},
      {"mask",
       absent().when(both(packed(), equals("sparse_mode", std::vector<int64_t>{0}))),
       "\"When Layout is TND/NTD_TND and PA enabled, sparseMode = 0, not support attentionMask\", "
       "prompt_flash_attention_tiling.cpp",
       {.tiling = true}},
      {"sparse_mode", one_of(std::vector<int64_t>{0, 1, 2, 3, 4}), kMasks},
      {"sparse_mode",
       one_of(std::vector<int64_t>{0, 3, 4}).when(packed()),
       "\"When Layout is TND/NTD_TND and PA enabled, sparseMode only support 0 or 3 or 4\", "
       "prompt_flash_attention_tiling.cpp",
       {.tiling = true}},
      {"pre_tokens",
       fits("not be below -nextTokens", {"next_tokens", "sparse_mode"},
            [](const RuleArguments& own) -> Found {
              if (own.integer(2) != 4 || own.integer() + own.integer(1) >= 0) return std::nullopt;
              return "value " + text(own.integer()) + " beside nextTokens " + text(own.integer(1));
            }),
       kMasks},
      {"pre_tokens", between(-2147483648LL, 2147483647LL), kDocument},
      {"next_tokens", between(-2147483648LL, 2147483647LL), kDocument},
      // --- lengths
      {"query_lengths", present().when(packed()), kPacked},
      {"key_lengths", present().when(packed()), kPacked},
      {"key_lengths", present().when(is_given("block_table")), kPaged},
      {"query_lengths",
       fits("grow from request to request and end with the tokens of query", {"query", "layout"},
            [](const RuleArguments& own) -> Found {
              const std::vector<int64_t>& ends = own.integers();
              const int64_t tokens = tokens_of(own.tensor(1), own.text(2));
              const bool grows = std::is_sorted(ends.begin(), ends.end());
              if (!ends.empty() && grows && ends.front() >= 0 && ends.back() == tokens) {
                return std::nullopt;
              }
              return "the end " + text(ends.empty() ? 0 : ends.back()) + " of " + text(tokens) +
                     " tokens" + (grows ? "" : ", and shrinks");
            })
           .when(packed()),
       "CheckActSeqWhenLayoutIsTND in prompt_flash_attention_tiling.cpp"},
      {"key_lengths",
       fits("have an entry for each request", {"query_lengths"},
            [](const RuleArguments& own) -> Found {
              if (own.integers().size() == own.integers(1).size()) return std::nullopt;
              return text(static_cast<int64_t>(own.integers().size())) + " entries for " +
                     text(static_cast<int64_t>(own.integers(1).size())) + " requests";
            })
           .when(packed()),
       kPacked},
      {"key_lengths",
       fits("grow from request to request and end with the tokens of key", {"key", "layout"},
            [](const RuleArguments& own) -> Found {
              const std::vector<int64_t>& ends = own.integers();
              const int64_t tokens = tokens_of(own.tensor(1), own.text(2));
              if (!ends.empty() && std::is_sorted(ends.begin(), ends.end()) &&
                  ends.back() == tokens) {
                return std::nullopt;
              }
              return "the end " + text(ends.empty() ? 0 : ends.back()) + " of " + text(tokens) +
                     " tokens";
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
           .when(both(packed(), equals("sparse_mode", std::vector<int64_t>{3}))),
       kPacked},
      {"query_lengths",
       that("have at most 4096 entries", {},
            [](const RuleArguments& own) -> Found {
              if (own.integers().size() <= 4096) return std::nullopt;
              return text(static_cast<int64_t>(own.integers().size())) + " entries";
            })
           .when(packed()),
       "MAX_VAR_LEN_SEQ_LEN in prompt_flash_attention_tiling.cpp",
       {.tiling = true}},
      // --- paged keys and values
      {"block_table", dtype({at::kInt}), kPaged},
      {"block_table", dims(2, 2), kPaged},
      {"block_table",
       fits("have a row for each request", {"key_lengths"},
            [](const RuleArguments& own) -> Found {
              const auto requests = static_cast<int64_t>(own.integers(1).size());
              if (size_of(own.tensor(), 0) == requests) return std::nullopt;
              return "sizes " + sizes_of(own.tensor()) + " for " + text(requests) + " requests";
            }),
       kPaged},
      {"block_table",
       fits("have a column for each block of the longest request", {"key_lengths", "block_size"},
            [](const RuleArguments& own) -> Found {
              int64_t longest = 0;
              for (const int64_t length : own.integers(1)) longest = std::max(longest, length);
              const int64_t size = std::max<int64_t>(1, own.integer(2));
              if (size_of(own.tensor(), 1) >= (longest + size - 1) / size) return std::nullopt;
              return "sizes " + sizes_of(own.tensor()) + " for a request of " + text(longest) +
                     " keys in blocks of " + text(size);
            }),
       kPaged},
      {"block_size",
       that("be a multiple of 16, at most 512", {},
            [](const RuleArguments& own) -> Found {
              const int64_t size = own.integer();
              if (size > 0 && size % 16 == 0 && size <= 512) return std::nullopt;
              return "value " + text(size);
            })
           .when(is_given("block_table")),
       kPaged,
       {.until = CannRelease::k8_5}},
      {"block_size",
       that("be a multiple of 16, at most 1024", {},
            [](const RuleArguments& own) -> Found {
              const int64_t size = own.integer();
              if (size > 0 && size % 16 == 0 && size <= 1024) return std::nullopt;
              return "value " + text(size);
            })
           .when(is_given("block_table")),
       kPaged,
       {.since = CannRelease::k9_0}},
      {"key",
       fits("have blocks of blockSize tokens", {"block_size"},
            [](const RuleArguments& own) -> Found {
              const TensorView& key = own.tensor();
              const int64_t tokens = size_of(key, key.dims == 3 ? 1 : -2);
              if (tokens == own.integer(1)) return std::nullopt;
              return "sizes " + sizes_of(key) + " beside blockSize " + text(own.integer(1));
            })
           .when(is_given("block_table")),
       kPaged},
      {"key",
       that("have rows of at most 65535 entries in [blocks, block, heads * size]", {},
            [](const RuleArguments& own) -> Found {
              const TensorView& key = own.tensor();
              if (key.dims != 3 || size_of(key, 2) <= 65535) return std::nullopt;
              return "sizes " + sizes_of(key);
            })
           .when(is_given("block_table")),
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
       kSizes,
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
      {"inner_precise", one_of(std::vector<int64_t>{0, 1, 2, 3}), kDocument},
      {"inner_precise",
       that("be 0 with fewer key heads than query heads", {"query_heads", "key_heads"},
            [](const RuleArguments& own) -> Found {
              const int64_t heads = own.integer(2);
              if (heads == 0 || heads == own.integer(1) || own.integer() == 0) return std::nullopt;
              return "value " + text(own.integer());
            })
           .when(packed()),
       "aclnnFusedInferAttentionScoreV4.md of 9.0, constraints of TND",
       {.tiling = true}},
      // --- results
      {"out", same_dtype("query").when(has_dtype("query", {at::kBFloat16})), kDocument},
      {"lse", present().when(equals("wants_lse", std::vector<int64_t>{1})), kDocument},
      {"lse", dtype({at::kFloat}).when(equals("wants_lse", std::vector<int64_t>{1})), kDocument},
      {"lse",
       fits("be [tokens, heads, 1]", {"query", "query_heads", "layout"},
            [](const RuleArguments& own) -> Found {
              const TensorView& lse = own.tensor();
              const int64_t tokens = tokens_of(own.tensor(1), own.text(3));
              if (lse.dims == 3 && lse.sizes[0] == tokens && lse.sizes[1] == own.integer(2) &&
                  lse.sizes[2] == 1) {
                return std::nullopt;
              }
              return "sizes " + sizes_of(lse);
            })
           .when(both(packed(), equals("wants_lse", std::vector<int64_t>{1}))),
       kDocument},
  };
  if (!with_rope) return all;
  const auto compressed = [] {
    return Condition{"the heads of query have 512 entries",
                     {"query", "layout", "query_heads"},
                     [](const RuleArguments& own) {
                       return head_size_of(own.tensor(), own.text(1), own.integer(2)) == 512;
                     }};
  };
  const std::vector<Row> rope{
      {"query_rope", present().when(is_given("key_rope")), kMla},
      {"key_rope", present().when(is_given("query_rope")), kMla},
      {"query_rope", same_dtype("query"), kMla},
      {"key_rope", same_dtype("key"), kMla},
      {"query_rope", size_in(-1, {64}), kMla, {.tiling = true}},
      {"query_rope",
       fits("have the tokens and heads of query", {"query"},
            [](const RuleArguments& own) -> Found {
              const TensorView& rope_view = own.tensor();
              const TensorView& query = own.tensor(1);
              if (rope_view.dims == query.dims && rope_view.dims >= 2 &&
                  std::equal(rope_view.sizes, rope_view.sizes + rope_view.dims - 1, query.sizes)) {
                return std::nullopt;
              }
              return "sizes " + sizes_of(rope_view) + " beside " + sizes_of(query);
            }),
       kMla},
      {"query",
       that("have equal head sizes of 128, or of 512 over the cache, beside queryRope",
            {"key", "value", "layout", "query_heads", "key_heads", "block_table", "query_rope"},
            [](const RuleArguments& own) -> Found {
              if (!given(own, 7) || !own.has(1) || !own.has(2)) return std::nullopt;
              const Sizes s = sizes_of_call(own);
              if (equal_to(s, 128) || equal_to(s, 512)) return std::nullopt;
              return shown(s);
            }),
       kMla,
       {.tiling = true}},
      {"query_rope", present().when(compressed()), kMla, {.tiling = true}},
      {"block_table", present().when(compressed()), kMla, {.tiling = true}},
      {"key_heads", one_of(std::vector<int64_t>{1}).when(compressed()), kMla, {.tiling = true}},
      {"query_heads",
       one_of(std::vector<int64_t>{1, 2, 4, 8, 16, 32, 64, 128}).when(compressed()),
       kMla,
       {.since = CannRelease::k8_5, .tiling = true}},
      {"query_heads",
       one_of(std::vector<int64_t>{32, 64, 128}).when(both(packed(), compressed())),
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
      // The page of 8.5 says so too. The tiling check of its release, CheckFeatureLse, takes it,
      // and later pages have dropped the sentence.
      {"wants_lse",
       one_of(std::vector<int64_t>{0}).when(compressed()),
       kMla,
       {.until = CannRelease::k8_3, .tiling = true}},
      {"sparse_mode",
       one_of(std::vector<int64_t>{0, 3, 4}).when(compressed()),
       kMla,
       {.tiling = true}},
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
       {.tiling = true}},
  };
  all.insert(all.end(), rope.begin(), rope.end());
  return all;
}

// A score of each head that takes part in the softmax without a value.
std::vector<Row> rows_with_sink() {
  std::vector<Row> all = rows(true);
  const std::vector<Row> sink{
      {"sink", dtype({at::kBFloat16}), kSink},
      {"sink", dims(1, 1), kSinkCheck, {.tiling = true}},
      {"sink",
       fits("have an entry for each head of query", {"query_heads"},
            [](const RuleArguments& own) -> Found {
              if (own.tensor().numel() == own.integer(1)) return std::nullopt;
              return "sizes " + sizes_of(own.tensor()) + " for " + text(own.integer(1)) + " heads";
            }),
       kSinkCheck,
       {.tiling = true}},
      {"value",
       that("have heads of 64 or 128 entries beside learnableSink",
            {"key", "query", "layout", "query_heads", "key_heads", "block_table"},
            [](const RuleArguments& own) -> Found {
              const int64_t key_heads = own.integer(5) == 0 ? own.integer(4) : own.integer(5);
              const int64_t size = key_size_of(own.tensor(), own.text(3), key_heads, given(own, 6));
              if (size == 64 || size == 128) return std::nullopt;
              return "heads of " + text(size);
            })
           .when(both(packed(), is_given("sink"))),
       kSinkCheck,
       {.tiling = true}},
      {"inner_precise",
       one_of(std::vector<int64_t>{0}).when(both(packed(), is_given("sink"))),
       "CheckFAISinglePara in fused_infer_attention_score_tiling.cpp",
       {.tiling = true}},
  };
  all.insert(all.end(), sink.begin(), sink.end());
  return all;
}

// The system's share and the partial results of a divided key axis.
constexpr Workspace kWorkspace{.bytes = 32 * kMiB, .copies = true};

}  // namespace

Allowed allowed_fused_infer_attention_score_v2() { return {kWorkspace, rows(false), kA2 | kA3}; }

Allowed allowed_fused_infer_attention_score_v3() { return {kWorkspace, rows(true), kA2 | kA3}; }

Allowed allowed_fused_infer_attention_score_v4() {
  return {kWorkspace, rows_with_sink(), kA2 | kA3};
}

}  // namespace vnpu::ops
