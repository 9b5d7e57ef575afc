#pragma once

// Softmax attention over strided or paged keys and values, on host memory: the arithmetic behind
// every attention operator. Plain C++; scores, softmax and sums are in fp32 whatever the element
// types are.

#include <cstdint>
#include <vector>

namespace vnpu::ops {

enum class Element : uint8_t { kFloat, kBFloat16, kHalf, kInt8 };
int64_t element_bytes(Element element);

// How int8 keys or values become numbers: (x + offset) * scale. Strides count floats; 0 broadcasts.
struct Dequantization {
  const float* scale = nullptr;  // null: the elements are numbers already
  const float* offset = nullptr;
  int64_t head = 0, block = 0, token = 0, channel = 0;
};

// Rows of `width` contiguous elements, one per head and token. Token t of a paged source lies at
// block_table[t / block_size] * block_stride + t % block_size * token_stride. Strides in bytes.
struct RowSource {
  const char* data = nullptr;
  Element element = Element::kFloat;
  int64_t width = 0;
  int64_t head_stride = 0, token_stride = 0, block_stride = 0;
  Dequantization dequantization;
};

// The queries of one sequence and the keys that they may see.
struct AttentionRequest {
  const char* query = nullptr;
  const char* query_rope = nullptr;
  char* out = nullptr;
  float* lse = nullptr;          // log of the sum of e^score; null: not wanted
  float* softmax_max = nullptr;  // the largest score; null: not wanted
  float* softmax_sum = nullptr;  // the sum of e^(score - softmax_max); null: not wanted
  RowSource key, key_rope, value;
  const int32_t* block_table = nullptr;  // null: keys and values are not paged
  int64_t query_length = 0;
  int64_t key_length = 0;
  // Key j is visible to query i iff i + first_visible <= j <= i + last_visible, unless masked.
  int64_t first_visible = INT32_MIN;
  int64_t last_visible = INT32_MAX;
  const uint8_t* mask = nullptr;  // [heads, queries, keys], nonzero hides; null: nothing is hidden
  const float* bias = nullptr;    // [heads, queries, keys], added to the scores
};

// Strides of query, query_rope and out are in bytes, of the others in elements.
struct AttentionProblem {
  int64_t query_heads = 0, key_heads = 0;
  int64_t head_size = 0, rope_size = 0, value_size = 0;
  float scale = 1;
  Element query_element = Element::kFloat;
  Element query_rope_element = Element::kFloat;
  Element out_element = Element::kFloat;
  int64_t query_head_stride = 0, query_token_stride = 0;
  int64_t query_rope_head_stride = 0, query_rope_token_stride = 0;
  int64_t out_head_stride = 0, out_token_stride = 0;
  int64_t lse_head_stride = 0, lse_token_stride = 0;  // of all three statistics
  int64_t mask_head_stride = 0, mask_query_stride = 0;
  int64_t bias_head_stride = 0, bias_query_stride = 0;
  float bias_factor = 1;        // of the bias in the scaled scores
  const float* sink = nullptr;  // [query_heads]: a score without a value, in every softmax
  int64_t block_size = 0;
  std::vector<AttentionRequest> requests;
};

// A piece of work: `rows` rows, from `first_row` on, of one request and one key head. Row r is
// query r / group of head r % group, where group = query_heads / key_heads.
struct AttentionPiece {
  int64_t request, key_head, first_row, rows;
};

// Maximum rows per piece: enough to use a tile of keys well, few enough for many pieces.
constexpr int64_t kMaxPieceRows = 96;

void attend_piece(const AttentionProblem& problem, const AttentionPiece& piece);

}  // namespace vnpu::ops
