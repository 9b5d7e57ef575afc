// Reads rows of keys and values as floats. Included once per vector width by
// attention_kernel_body.h, inside a namespace: no include guard.

inline const char* row_at(const AttentionProblem& problem, const AttentionRequest& request,
                          const RowSource& source, int64_t head, int64_t token) {
  const char* const base = source.data + head * source.head_stride;
  if (request.block_table == nullptr) return base + token * source.token_stride;
  return base + request.block_table[token / problem.block_size] * source.block_stride +
         token % problem.block_size * source.token_stride;
}

inline void dequantize_row(const AttentionProblem& problem, const AttentionRequest& request,
                           const Dequantization& how, int64_t head, int64_t token, int64_t width,
                           float* row) {
  int64_t at = head * how.head;
  if (request.block_table != nullptr && how.block != 0) {
    at += request.block_table[token / problem.block_size] * how.block +
          token % problem.block_size * how.token;
  } else {
    at += token * how.token;
  }
  for (int64_t d = 0; d < width; ++d) {
    const int64_t i = at + d * how.channel;
    row[d] = (row[d] + (how.offset != nullptr ? how.offset[i] : 0.0f)) * how.scale[i];
  }
}

// Rows to prefetch: a cache is read once per step and rarely found in the nearest caches, and rows
// are too far apart for the processor's own prefetcher.
constexpr int64_t kRowsAhead = 32;

// Compressed keys and values are the same rows.
inline bool same_rows(const RowSource& one, const RowSource& other) {
  return one.data == other.data && one.element == other.element && one.width == other.width &&
         one.token_stride == other.token_stride && one.head_stride == other.head_stride &&
         one.block_stride == other.block_stride && one.dequantization.scale == nullptr &&
         other.dequantization.scale == nullptr;
}

inline void prefetch_row(const RowSource& source, const char* row) {
  const int64_t bytes = source.width * element_bytes(source.element);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

inline void prefetch_rows(const AttentionProblem& problem, const AttentionRequest& request,
                          const RowSource& source, int64_t head, int64_t first) {
  const int64_t count = std::min(kRowsAhead, request.key_length - first);
  for (int64_t t = 0; t < count; ++t) {
    prefetch_row(source, row_at(problem, request, source, head, first + t));
  }
}

// Rows [first, first + count) of a source as floats, `stride` apart from `to` on. Returns their
// address: the source's own memory if it is fp32 already and one stride describes it.
inline const float* tile_rows(const AttentionProblem& problem, const AttentionRequest& request,
                              const RowSource& source, int64_t head, int64_t first, int64_t count,
                              bool in_place, float* to, int64_t* stride) {
  const bool one_block = request.block_table == nullptr ||
                         first / problem.block_size == (first + count - 1) / problem.block_size;
  if (in_place && one_block && source.element == Element::kFloat && source.width % kFloats == 0) {
    *stride = source.token_stride / 4;
    return reinterpret_cast<const float*>(row_at(problem, request, source, head, first));
  }
  const bool quantized = source.dequantization.scale != nullptr;
  const char* next = one_block ? row_at(problem, request, source, head, first) : nullptr;
  for (int64_t t = 0; t < count; ++t) {
    if (!one_block) next = row_at(problem, request, source, head, first + t);
    // The prefetch may pass a block's end: nothing waits for that memory.
    prefetch_row(source, next + kRowsAhead * source.token_stride);
    float* const row = to + t * *stride;
    widen_row(source.element, next, source.width, row);
    if (quantized) {
      dequantize_row(problem, request, source.dequantization, head, first + t, source.width, row);
    }
    next += source.token_stride;
  }
  return to;
}
