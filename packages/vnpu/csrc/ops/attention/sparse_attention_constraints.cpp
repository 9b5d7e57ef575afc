// What the operators of sparse attention can be called with, and what they cost. Sources: docs of
// ops-transformer v8.5.0 and v9.0.0.

#include <algorithm>

#include "ops/attention/declarations.h"
#include "ops/dtype_lists.h"

namespace vnpu::ops {
namespace {

constexpr char kIndexer[] = "aclnnLightningIndexer.md, parameters";
constexpr char kIndexerLimits[] = "aclnnLightningIndexer.md, constraints";
constexpr char kSparse[] = "aclnnSparseFlashAttention.md, parameters";
constexpr char kSparseLimits[] = "aclnnSparseFlashAttention.md, constraints";

const auto kQueryLayouts = std::vector<std::string>{"BSND", "TND"};
const auto kKeyLayouts = std::vector<std::string>{"BSND", "TND", "PA_BSND"};
const auto kPaged = std::vector<std::string>{"PA_BSND"};
const auto kPacked = std::vector<std::string>{"TND"};
const auto kDense = std::vector<std::string>{"BSND"};
const auto kWithBatches = std::vector<std::string>{"BSND", "PA_BSND"};
const auto kWithLengths = std::vector<std::string>{"TND", "PA_BSND"};
const auto kAllTokens = std::vector<int64_t>{INT64_MAX};

Condition packed(const char* layout) { return equals(layout, kPacked); }

Check counts_of_sparse_tokens() {
  return that("be 1 to 2048, or 3072, 4096, 5120, 6144, 7168 or 8192", {},
              [](const RuleArguments& own) -> Found {
                const int64_t count = own.integer();
                if (count >= 1 && (count <= 2048 || (count <= 8192 && count % 1024 == 0)))
                  return std::nullopt;
                return "value " + text(count);
              });
}

Check float32_or_dtype_of(const char* other) {
  return that(std::string("be float32 or have the dtype of ") + other, {other},
              [](const RuleArguments& own) -> Found {
                const ScalarType type = own.tensor().dtype;
                if (type == at::kFloat || type == own.tensor(1).dtype) return std::nullopt;
                return "dtype " + name_of(type) + " beside " + name_of(own.tensor(1).dtype);
              });
}

Check divides_block_of(const char* cache) {
  return that("be 1 to 128 and divide the block size", {cache, "key_layout"},
              [](const RuleArguments& own) -> Found {
                const int64_t size = own.integer();
                const bool fits_block =
                    own.text(2) != "PA_BSND" || (size > 0 && size_of(own.tensor(1), 1) % size == 0);
                if (size >= 1 && size <= 128 && fits_block) return std::nullopt;
                return "value " + text(size);
              });
}

// What both operators say of tables, lengths and layouts.
void add_common(std::vector<Row>& rows, const char* parameters, const char* limits) {
  const auto on_pages = [] { return equals("key_layout", kPaged); };
  rows.insert(rows.end(),
              {
                  {"query", dtype(kHalves), parameters},
                  {"query", dims(3, 3).when(packed("query_layout")), parameters},
                  {"query", dims(4, 4).when(equals("query_layout", kDense)), parameters},
                  {"query", contiguous(), parameters},
                  {"query", not_empty(), parameters},
                  {"key", same_dtype("query"), limits},
                  {"key", dims(3, 3).when(packed("key_layout")), parameters},
                  {"key", dims(4, 4).when(equals("key_layout", kWithBatches)), parameters},
                  {"key", contiguous(), parameters},
                  {"key", not_empty(), parameters},
                  {"key", size_in(-2, {1}), limits},
                  {"key", size_between(1, 16, 1024, 16).when(on_pages()), limits},
                  {"query_lengths", dtype({at::kInt}), parameters},
                  {"query_lengths", dims(1, 1), parameters},
                  {"query_lengths", contiguous(), parameters},
                  {"query_lengths", present().when(packed("query_layout")), parameters},
                  {"key_lengths", dtype({at::kInt}), parameters},
                  {"key_lengths", dims(1, 1), parameters},
                  {"key_lengths", contiguous(), parameters},
                  {"key_lengths", present().when(equals("key_layout", kWithLengths)), parameters},
                  {"block_table", dtype({at::kInt}), parameters},
                  {"block_table", dims(2, 2), parameters},
                  {"block_table", contiguous(), parameters},
                  {"block_table", present().when(on_pages()), parameters},
                  {"query_layout", one_of(kQueryLayouts), parameters},
                  {"key_layout", one_of(kKeyLayouts), parameters},
                  {"sparse_mode", one_of(std::vector<int64_t>{0, 3}), parameters},
                  {"pre_tokens", one_of(kAllTokens), parameters},
                  {"next_tokens", one_of(kAllTokens), parameters},
              });
}

// Queries, and the keys that a cache or a sequence has room for: lengths are on the device.
struct Rows {
  int64_t queries, keys;
};
Rows rows_of(const Call& call) {
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const int64_t queries =
      query.numel() / std::max<int64_t>(size_at(query, -1) * size_at(query, -2), 1);
  if (call.text("key_layout") == "PA_BSND") {
    return {queries, size_at(call.tensor("block_table"), 1) * size_at(key, 1)};
  }
  return {queries, size_at(key, call.text("key_layout") == "TND" ? 0 : 1)};
}

}  // namespace

Allowed allowed_lightning_indexer() {
  std::vector<Row> rows;
  add_common(rows, kIndexer, kIndexerLimits);
  rows.insert(rows.end(),
              {
                  {"query", size_in(-1, {128}), kIndexerLimits},
                  {"query", size_between(-2, 1, 64), kIndexerLimits},
                  {"key", size_in(-1, {128}), kIndexerLimits},
                  {"weights", dtype({at::kHalf, at::kBFloat16, at::kFloat}), kIndexer},
                  {"weights", float32_or_dtype_of("query"), kIndexerLimits},
                  {"weights", dims(2, 2).when(packed("query_layout")), kIndexer},
                  {"weights", dims(3, 3).when(equals("query_layout", kDense)), kIndexer},
                  {"weights", contiguous(), kIndexer},
                  {"weights", same_size(0, "query", 0), kIndexer},
                  {"sparse_count", counts_of_sparse_tokens(), kIndexer},
                  {"returns_values",
                   one_of(std::vector<int64_t>{0}).when(equals("key_layout", kPaged)), kIndexer},
                  {"indices", dtype({at::kInt}), kIndexer},
                  {"indices", contiguous(), kIndexer},
              });
  return {{.bytes = 16 * kMiB}, std::move(rows), kBigChips};
}

Allowed allowed_sparse_flash_attention() {
  std::vector<Row> rows;
  add_common(rows, kSparse, kSparseLimits);
  rows.insert(rows.end(),
              {
                  {"query", size_in(-1, {512}), kSparseLimits},
                  {"query", size_in(-2, {1, 2, 4, 8, 16, 32, 64, 128}), kSparseLimits},
                  {"key", size_in(-1, {512}), kSparseLimits},
                  {"value", same_dtype("query"), kSparseLimits},
                  {"value", same_sizes("key"), kSparse},
                  {"value", contiguous(), kSparse},
                  {"sparse_indices", dtype({at::kInt}), kSparse},
                  {"sparse_indices", dims(3, 3).when(packed("query_layout")), kSparse},
                  {"sparse_indices", dims(4, 4).when(equals("query_layout", kDense)), kSparse},
                  {"sparse_indices", contiguous(), kSparse},
                  {"sparse_indices", not_empty(), kSparse},
                  {"sparse_indices", same_size(0, "query", 0), kSparse},
                  {"query_rope", present(), kSparse},
                  {"query_rope", same_dtype("query"), kSparse},
                  {"query_rope", size_in(-1, {64}), kSparseLimits},
                  {"query_rope", contiguous(), kSparse},
                  {"key_rope", present(), kSparse},
                  {"key_rope", same_dtype("query"), kSparse},
                  {"key_rope", size_in(-1, {64}), kSparseLimits},
                  {"key_rope", contiguous(), kSparse},
                  {"sparse_block_size", divides_block_of("key"), kSparseLimits},
                  {"attention_mode", one_of(std::vector<int64_t>{2}), kSparse},
                  {"returns_softmax",
                   one_of(std::vector<int64_t>{0}).when(equals("key_layout", kPaged)), kSparse},
                  {"out", same_sizes("query"), kSparse},
                  {"out", same_dtype("query"), kSparse},
              });
  return {{.bytes = 32 * kMiB}, std::move(rows), kBigChips};
}

// One product of all heads' queries with the keys, then three operations on each score and the
// selection of the largest.
void cost_of_lightning_indexer(const Call& call, timing::Work& work) {
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const auto [queries, keys] = rows_of(call);
  const int64_t heads = size_at(query, -2);
  work.kind = timing::Work::Class::kAttention;
  work.wide = true;
  work.products.push_back({1, queries * heads, keys, size_at(query, -1), arithmetic_of(query)});
  work.vector_operations = queries * keys * (3 * heads + 8);
  const int64_t requests = call.has("key_lengths") ? call.tensor("key_lengths").numel() : 1;
  work.read_bytes =
      bytes_of(query) + bytes_of(call.tensor("weights")) +
      requests * keys * size_at(key, -1) * static_cast<int64_t>(c10::elementSize(key.dtype));
  work.written_bytes = bytes_of(call.tensor("indices"));
}

// Each query reads its own rows: keys serve as values.
void cost_of_sparse_flash_attention(const Call& call, timing::Work& work) {
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const auto [queries, keys] = rows_of(call);
  const int64_t heads = size_at(query, -2);
  const int64_t rope = size_at(call.tensor("query_rope"), -1);
  const int64_t chosen =
      std::min(keys, size_at(call.tensor("sparse_indices"), -1) *
                         std::max<int64_t>(call.integer("sparse_block_size", 1), 1));
  work.kind = timing::Work::Class::kAttention;
  work.wide = true;
  work.products.push_back(
      {queries, heads, chosen, 2 * size_at(query, -1) + rope, arithmetic_of(query)});
  work.vector_operations = 6 * queries * heads * chosen;
  work.read_bytes = bytes_of(query) + bytes_of(call.tensor("query_rope")) +
                    queries * chosen * (size_at(key, -1) + rope) *
                        static_cast<int64_t>(c10::elementSize(key.dtype));
  work.written_bytes = bytes_of(call.tensor("out"));
}

}  // namespace vnpu::ops
