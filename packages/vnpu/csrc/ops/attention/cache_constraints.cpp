// What the operators of key-value caches, rotary embeddings and partial attention can be called
// with. Sources: docs of ops-transformer v8.5.0 and v9.0.0, and the pages of op-plugin.

#include "ops/attention/declarations.h"
#include "ops/dtype_lists.h"

namespace vnpu::ops {
namespace {

constexpr char kScatter[] = "aclnnScatterPaKvCache.md, parameters";
constexpr char kScatterNd[] = "CheckDtypeValid in aclnn_scatter_nd_update.cpp";
constexpr char kScatterTiling[] = "scatter_pa_kv_cache_tiling.cpp";
constexpr char kGather[] = "aclnnGatherPaKvCache.md, parameters";
constexpr char kNorm[] = "aclnnKvRmsNormRopeCache.md, parameters";
constexpr char kInterleave[] = "aclnnInterleaveRope.md, parameters";
constexpr char kRotary[] = "aclnnRopeWithSinCosCache.md, constraints";
constexpr char kUpdate[] = "aclnnAttentionUpdate.md, parameters";

const auto kNorms = std::vector<std::string>{"", "Norm", "None"};
const auto kPieces = std::vector<std::string>{"PA_NZ"};

Check dtype_of_kv_or_int8() {
  return that("have the dtype of kv, or int8 with scales", {"kv"},
              [](const RuleArguments& own) -> Found {
                const ScalarType type = own.tensor().dtype;
                if (type == own.tensor(1).dtype || type == at::kChar) return std::nullopt;
                return "dtype " + name_of(type) + " beside " + name_of(own.tensor(1).dtype);
              });
}

Check holds_a_row_per_token(const char* rows) {
  return fits(std::string("hold the heads of ") + rows, {rows},
              [](const RuleArguments& own) -> Found {
                const TensorView& cache = own.tensor();
                const TensorView& row = own.tensor(1);
                const bool fits_heads = cache.dims == 4 && size_of(cache, 2) == size_of(row, 1) &&
                                        size_of(cache, 3) == size_of(row, 2);
                if (fits_heads) return std::nullopt;
                return "sizes " + sizes_of(cache) + " beside " + sizes_of(row);
              });
}

Check holds_all_tokens() {
  return fits("have a slot for each token", {"slot_mapping", "cache_mode"},
              [](const RuleArguments& own) -> Found {
                const TensorView& cache = own.tensor();
                const int64_t slots =
                    size_of(cache, 0) * size_of(cache, own.text(2) == "PA_NZ" ? -2 : 1);
                if (slots >= own.tensor(1).numel()) return std::nullopt;
                return text(slots) + " slots for " + text(own.tensor(1).numel()) + " tokens";
              });
}

Check pieces_of_32_bytes() {
  return that("end in pieces of 32 bytes", {}, [](const RuleArguments& own) -> Found {
    const TensorView& cache = own.tensor();
    const int64_t bytes = size_of(cache, -1) * static_cast<int64_t>(at::elementSize(cache.dtype));
    if (bytes == 32) return std::nullopt;
    return "sizes " + sizes_of(cache) + " of " + name_of(cache.dtype);
  });
}

}  // namespace

Allowed allowed_scatter_nd_update() {
  return {{},
          {{"self",
            dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kBool, at::kShort, at::kLong,
                   at::kChar, at::kInt}),
            kScatterNd, kOnBigChips},
           {"indices", dtype({at::kInt, at::kLong}), kScatterNd},
           {"updates", same_dtype("self"), kScatterNd}}};
}

Allowed allowed_scatter_pa_kv_cache() {
  return {
      {.bytes = 16 * kMiB},
      {
          {"key", dtype({at::kHalf, at::kBFloat16, at::kChar}), kScatter},
          {"key", dims(3, 4), kScatter},
          {"key", contiguous(), kScatter},
          {"key", not_empty(), kScatterTiling, {.tiling = true}},
          {"value", same_dtype("key"), kScatter},
          {"value", contiguous(), kScatter},
          {"value",
           fits("have the tokens and heads of key", {"key"},
                [](const RuleArguments& own) -> Found {
                  const TensorView& value = own.tensor();
                  const TensorView& key = own.tensor(1);
                  if (value.numel() == 0 || (size_of(value, 0) == size_of(key, 0) &&
                                             size_of(value, 1) == size_of(key, 1))) {
                    return std::nullopt;
                  }
                  return "sizes " + sizes_of(value) + " beside " + sizes_of(key);
                }),
           kScatter},
          {"key_cache", same_dtype("key"), kScatter},
          {"key_cache", dims(4, 5), kScatter},
          {"key_cache", contiguous(), kScatter},
          {"key_cache",
           holds_a_row_per_token("key").when(
               both(equals("cache_mode", kNorms), is_missing("compress_lens"))),
           kScatter},
          {"key_cache", holds_all_tokens().when(is_missing("compress_lens")), kScatterTiling},
          {"key_cache", pieces_of_32_bytes().when(equals("cache_mode", kPieces)), kScatter},
          {"value_cache", same_dtype("key"), kScatter},
          {"value_cache", contiguous(), kScatter},
          {"value_cache", pieces_of_32_bytes().when(equals("cache_mode", kPieces)), kScatter},
          {"slot_mapping", dtype({at::kInt, at::kLong}), kScatter},
          {"slot_mapping", contiguous(), kScatter},
          {"slot_mapping", dims(1, 2), kScatter},
          {"slot_mapping", same_size(0, "key", 0).when(is_missing("compress_lens")), kScatter},
          {"cache_mode", one_of(std::vector<std::string>{"", "Norm", "None", "PA_NZ"}), kScatter},
      },
      kBigChips};
}

Allowed allowed_gather_pa_kv_cache() {
  return {{.bytes = 16 * kMiB},
          {
              {"key_cache", dtype({at::kHalf, at::kBFloat16, at::kChar}), kGather},
              {"value_cache", same_dtype("key_cache"), kGather},
              {"key", same_dtype("key_cache"), kGather},
              {"value", same_dtype("value_cache"), kGather},
              {"key_cache", contiguous(), kGather},
              {"value_cache", contiguous(), kGather},
              {"key", contiguous(), kGather},
              {"value", contiguous(), kGather},
              {"block_tables", dtype({at::kInt}), kGather},
              {"block_tables", dims(2, 2), kGather},
              {"block_tables", contiguous(), kGather},
              {"block_tables", not_empty(), kGather},
              {"seq_lens", dtype({at::kInt}), kGather},
              {"seq_lens", dims(1, 1), kGather},
              {"seq_lens", contiguous(), kGather},
              {"seq_offset", dtype({at::kInt}), kGather},
              {"seq_offset", contiguous(), kGather},
              {"value", same_size(0, "key", 0), kGather},
              {"key",
               that("have rows of at most 148 KiB", {},
                    [](const RuleArguments& own) -> Found {
                      const TensorView& key = own.tensor();
                      int64_t bytes = static_cast<int64_t>(at::elementSize(key.dtype));
                      for (int i = 1; i < key.dims; ++i) bytes *= key.sizes[i];
                      if (bytes <= 148 * 1024) return std::nullopt;
                      return "rows of " + text(bytes) + " bytes";
                    }),
               "gather_pa_kv_cache_tiling.cpp",
               {.tiling = true}},
          },
          kBigChips};
}

Allowed allowed_kv_rms_norm_rope_cache() {
  return {
      {.bytes = 32, .copies = true},
      {
          {"kv", dtype(kHalves), kNorm},
          {"kv", dims(4, 4), kNorm},
          {"kv", size_in(1, {1}), kNorm, {.tiling = true}},
          {"kv", not_empty(), kNorm, {.tiling = true}},
          {"kv", size_in(-1, {576}), kNorm, {.tiling = true}},
          {"gamma", same_dtype("kv"), kNorm},
          {"gamma", dims(1, 1), kNorm},
          {"gamma", size_in(0, {512}), kNorm, {.tiling = true}},
          {"cos", same_dtype("kv"), kNorm},
          {"sin", same_dtype("kv"), kNorm},
          {"cos", size_in(-1, {64}), kNorm, {.tiling = true}},
          {"sin", same_sizes("cos"), kNorm},
          {"cos", same_size(0, "kv", 0), kNorm},
          {"index", dtype({at::kLong}), kNorm},
          {"index",
           fits("have an entry for each token", {"kv", "cache_mode"},
                [](const RuleArguments& own) -> Found {
                  const TensorView& kv = own.tensor(1);
                  const int64_t tokens = size_of(kv, 0) * size_of(kv, 2);
                  const std::string& mode = own.text(2);
                  const bool per_token = mode == "PA" || mode == "PA_BNSD" || mode == "PA_NZ";
                  if (!per_token || own.tensor().numel() == tokens) {
                    return std::nullopt;
                  }
                  return "sizes " + sizes_of(own.tensor()) + " for " + text(tokens) + " tokens";
                }),
           kNorm},
          {"rope_cache", dtype_of_kv_or_int8(), kNorm},
          {"latent_cache", dtype_of_kv_or_int8(), kNorm},
          {"rope_cache", contiguous(), kNorm},
          {"latent_cache", contiguous(), kNorm},
          {"rope_cache",
           size_in(-1, {64}).when(equals("cache_mode", std::vector<std::string>{"PA_BNSD", "PA"})),
           kNorm,
           {.tiling = true}},
          {"latent_cache",
           size_in(-1, {512}).when(equals("cache_mode", std::vector<std::string>{"PA_BNSD", "PA"})),
           kNorm,
           {.tiling = true}},
          {"cache_mode",
           one_of(std::vector<std::string>{"", "Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD",
                                           "PA_BLK_NZ"}),
           kNorm},
          {"rope_offset", absent(), kNorm, {.until = CannRelease::k8_5}},
          {"latent_offset", absent(), kNorm, {.until = CannRelease::k8_5}},
      },
      kBigChips};
}

Allowed allowed_interleave_rope() {
  return {{.bytes = 32, .copies = true},
          {
              {"x", dtype(kHalves), kInterleave},
              {"x", dims(4, 4), kInterleave},
              {"x", not_empty(), kInterleave, {.tiling = true}},
              {"x", size_in(-1, {64}), kInterleave, {.tiling = true}},
              {"cos", same_dtype("x"), kInterleave},
              {"sin", same_dtype("x"), kInterleave},
              {"cos", size_in(-1, {64}), kInterleave, {.tiling = true}},
              {"cos", size_in(1, {1}), kInterleave, {.tiling = true}},
              {"cos", same_size(0, "x", 0), kInterleave},
              {"sin", same_sizes("cos"), kInterleave},
              {"out", same_sizes("x"), kInterleave},
              {"out", same_dtype("x"), kInterleave},
          },
          kBigChips};
}

namespace {

// 32 entries in 16-bit types, 16 in float32.
Check multiple_of_64_bytes(const char* typed_by) {
  return that("be a multiple of 32 (float32: 16)", {typed_by},
              [](const RuleArguments& own) -> Found {
                const int64_t multiple = own.tensor(1).dtype == at::kFloat ? 16 : 32;
                if (own.integer() > 0 && own.integer() % multiple == 0) return std::nullopt;
                return "value " + text(own.integer());
              });
}

std::vector<Row> rotary_rows() {
  return {
      {"query", dtype({at::kHalf, at::kBFloat16, at::kFloat}), kRotary},
      {"key", same_dtype("query"), kRotary},
      {"table", same_dtype("query"), kRotary},
      {"query", dims(2, 2), kRotary},
      {"key", dims(2, 2), kRotary},
      {"query", not_empty(), kRotary, {.tiling = true}},
      {"key", not_empty(), kRotary, {.tiling = true}},
      {"query", contiguous_rows(), kRotary},
      {"key", contiguous_rows(), kRotary},
      {"key", same_size(0, "query", 0), kRotary},
      {"table", contiguous(), kRotary},
      {"head_size",
       multiple_of_64_bytes("query"),
       "op-plugin torch_npu-npu_mrope.md, head_size",
       {.tiling = true}},
      {"table",
       that("have rows of a multiple of 32 entries (float32: 16), at most headSize", {"head_size"},
            [](const RuleArguments& own) -> Found {
              const int64_t size = size_of(own.tensor(), -1);
              const int64_t multiple = own.tensor().dtype == at::kFloat ? 16 : 32;
              if (size % multiple == 0 && size <= own.integer(1)) return std::nullopt;
              return "sizes " + sizes_of(own.tensor()) + " beside headSize " + text(own.integer(1));
            }),
       "op-plugin torch_npu-npu_mrope.md, rotary_dim",
       {.tiling = true}},
      {"positions", dtype({at::kLong}), kRotary, {.until = CannRelease::k8_5}},
      {"positions", dtype({at::kLong, at::kInt}), kRotary, {.since = CannRelease::k9_0}},
      {"positions",
       fits("have an entry for each token", {"query"},
            [](const RuleArguments& own) -> Found {
              if (size_of(own.tensor(), -1) == size_of(own.tensor(1), 0)) return std::nullopt;
              return "sizes " + sizes_of(own.tensor()) + " for " + text(size_of(own.tensor(1), 0)) +
                     " tokens";
            }),
       kRotary},
      {"section",
       that("be [0, 0, 0] or [16, 24, 24]", {},
            [](const RuleArguments& own) -> Found {
              const std::vector<int64_t>& section = own.integers();
              if (section.empty() || section == std::vector<int64_t>{0, 0, 0} ||
                  section == std::vector<int64_t>{16, 24, 24}) {
                return std::nullopt;
              }
              return "another value";
            }),
       kRotary,
       {.until = CannRelease::k8_5, .tiling = true}},
  };
}
}  // namespace

Allowed allowed_rope_with_sin_cos_cache() {
  return {{.bytes = 16 * kMiB}, rotary_rows(), kBigChips};
}

Allowed allowed_attention_update() {
  return {{.bytes = 16 * kMiB},
          {
              {"lse", dtype({at::kFloat}), kUpdate},
              {"lse", dims(1, 1), kUpdate},
              {"parts", dtype({at::kFloat, at::kHalf, at::kBFloat16}), kUpdate},
              {"parts", dims(2, 2), kUpdate},
              {"parts", size_between(-1, 8, 512, 8), kUpdate, {.tiling = true}},
              {"parts",
               that("be 1 to 16 parts, as many as lse", {"lse"},
                    [](const RuleArguments& own) -> Found {
                      const uint32_t parts = own[0].tensors.count;
                      if (parts >= 1 && parts <= 16 && parts == own[1].tensors.count)
                        return std::nullopt;
                      return text(parts) + " parts beside " + text(own[1].tensors.count) + " lse";
                    }),
               kUpdate},
              {"lse", same_size(0, "parts", 0), kUpdate},
              {"out", same_dtype("parts"), kUpdate},
              {"out", same_sizes("parts"), kUpdate},
              {"wants_lse", one_of(std::vector<int64_t>{0, 1}), kUpdate},
          },
          kBigChips};
}

}  // namespace vnpu::ops
