// Included once per vector width by attention_kernel.cpp, inside a namespace: no include guard.

#include "ops/attention/attention_vectors_body.h"

// In this order: both use the vectors.
#include "ops/attention/attention_products_body.h"
#include "ops/attention/attention_rows_body.h"

// The state of the softmax of each row, and its visible keys.
struct Rows {
  int64_t first[kMaxPieceRows];
  int64_t last[kMaxPieceRows];
  alignas(64) float maximum[kMaxPieceRows + 16];
  alignas(64) float total[kMaxPieceRows + 16];
  alignas(64) float decay[kMaxPieceRows + 16];
};

// Softmax of one tile whose scores are [token][row]: lanes are rows.
inline void softmax_columns(Rows& rows, int64_t padded, float* scores, int64_t tokens) {
  for (int64_t r = 0; r < padded; r += kFloats) {
    const Vector before = load(rows.maximum + r);
    Vector top = before;
    for (int64_t t = 0; t < tokens; ++t) {
      const Vector s = load(scores + t * padded + r);
      top = s > top ? s : top;
    }
    const Vector zero{};
    const Vector base = top == splat(-kInfinity) ? zero : top;  // nothing visible yet
    const Vector decay = exponential(before - base);
    Vector total = load(rows.total + r) * decay;
    for (int64_t t = 0; t < tokens; ++t) {
      const Vector p = exponential(load(scores + t * padded + r) - base);
      save(scores + t * padded + r, p);
      total += p;
    }
    save(rows.maximum + r, top);
    save(rows.total + r, total);
    save(rows.decay + r, decay);
  }
}

// The same with scores [row][token] and kTile scores per row: lanes are tokens.
inline void softmax_rows(Rows& rows, int64_t count, float* scores) {
  for (int64_t r = 0; r < count; ++r) {
    float* const row = scores + r * kTile;
    Vector top = load(row);
    for (int64_t t = kFloats; t < kTile; t += kFloats) {
      const Vector s = load(row + t);
      top = s > top ? s : top;
    }
    const float before = rows.maximum[r];
    const float highest = std::max(before, maximum(top));
    const float base = highest == -kInfinity ? 0.0f : highest;
    Vector total{};
    for (int64_t t = 0; t < kTile; t += kFloats) {
      const Vector p = exponential(load(row + t) - splat(base));
      save(row + t, p);
      total += p;
    }
    const float decay = before == -kInfinity ? 0.0f : std::exp(before - base);
    rows.maximum[r] = highest;
    rows.decay[r] = decay;
    rows.total[r] = rows.total[r] * decay + sum(total);
  }
}

void attend(const AttentionProblem& problem, const AttentionPiece& piece) {
  const AttentionRequest& request = problem.requests[static_cast<size_t>(piece.request)];
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t count = piece.rows;
  const int64_t width = round_up(problem.head_size + problem.rope_size, kFloats);
  const int64_t value_width = round_up(problem.value_size, kFloats);
  const bool few = count < 8;  // too few rows to fill vectors with rows
  const int64_t padded = round_up(count, kFloats);
  const auto head_of = [&](int64_t r) {
    return piece.key_head * group + (piece.first_row + r) % group;
  };
  const auto query_of = [&](int64_t r) { return (piece.first_row + r) / group; };

  Rows rows;
  int64_t begin = request.key_length;
  int64_t end = 0;
  for (int64_t r = 0; r < count; ++r) {
    rows.first[r] = std::max<int64_t>(0, query_of(r) + request.first_visible);
    rows.last[r] = std::min(request.key_length - 1, query_of(r) + request.last_visible);
    if (rows.first[r] > rows.last[r]) continue;
    begin = std::min(begin, rows.first[r]);
    end = std::max(end, rows.last[r] + 1);
  }
  for (int64_t r = 0; r < padded; ++r) {
    const bool sink = r < count && problem.sink != nullptr;
    rows.maximum[r] = sink ? problem.sink[head_of(r)] : -kInfinity;
    rows.total[r] = sink ? 1.0f : 0.0f;
  }

  if (begin < end) {
    prefetch_rows(problem, request, request.key, piece.key_head, begin / kTile * kTile);
  }
  float* memory = scratch(padded * width + kTile * width + kTile * value_width +
                          count * value_width + kTile * std::max<int64_t>(padded, 16));
  const auto take = [&memory](int64_t floats) {
    float* const taken = memory;
    memory += floats;
    return taken;
  };
  float* const query = take(padded * width);  // [row][d] when few, else [d][row]
  float* const keys = take(kTile * width);
  float* const values = take(kTile * value_width);
  float* const sums = take(count * value_width);
  float* const scores =
      take(kTile * std::max<int64_t>(padded, 16));  // [row][t] when few, else [t][row]
  std::fill_n(query, padded * width, 0.0f);
  std::fill_n(sums, count * value_width, 0.0f);
  if (width != problem.head_size + problem.rope_size) std::fill_n(keys, kTile * width, 0.0f);
  if (value_width != problem.value_size) std::fill_n(values, kTile * value_width, 0.0f);

  for (int64_t r = 0; r < count; ++r) {
    float* const row = few ? query + r * width : keys;
    widen_row(problem.query_element,
              request.query + head_of(r) * problem.query_head_stride +
                  query_of(r) * problem.query_token_stride,
              problem.head_size, row);
    if (problem.rope_size > 0) {
      widen_row(problem.query_rope_element,
                request.query_rope + head_of(r) * problem.query_rope_head_stride +
                    query_of(r) * problem.query_rope_token_stride,
                problem.rope_size, row + problem.head_size);
    }
    if (few) continue;
    for (int64_t d = 0; d < problem.head_size + problem.rope_size; ++d)
      query[d * padded + r] = row[d];
  }

  const bool shared = same_rows(request.key, request.value);
  for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
    const int64_t tokens = std::min(kTile, request.key_length - tile);
    if (!shared) prefetch_rows(problem, request, request.value, piece.key_head, tile);
    int64_t key_stride = width;
    const float* const k = tile_rows(problem, request, request.key, piece.key_head, tile, tokens,
                                     problem.rope_size == 0, keys, &key_stride);
    if (problem.rope_size > 0) {
      int64_t stride = width;
      tile_rows(problem, request, request.key_rope, piece.key_head, tile, tokens, false,
                keys + problem.head_size, &stride);
    }
    if (few) {
      int64_t r = 0;
      for (; r + 4 <= count; r += 4) {
        score_rows<4>(query + r * width, width, k, key_stride, tokens, width, scores + r * kTile,
                      kTile);
      }
      for (; r + 2 <= count; r += 2) {
        score_rows<2>(query + r * width, width, k, key_stride, tokens, width, scores + r * kTile,
                      kTile);
      }
      if (r < count) {
        score_rows<1>(query + r * width, width, k, key_stride, tokens, width, scores + r * kTile,
                      kTile);
      }
    } else {
      multiply(k, key_stride, 1, query, padded, scores, padded, tokens, padded, width, false);
    }

    const int64_t row_step = few ? kTile : 1;
    const int64_t token_step = few ? 1 : padded;
    const int64_t all = few ? count * kTile : tokens * padded;
    for (int64_t i = 0; i < all; i += kFloats) save(scores + i, load(scores + i) * problem.scale);
    for (int64_t r = 0; r < count; ++r) {
      float* const row = scores + r * row_step;
      if (request.bias != nullptr) {
        const float* const bias = request.bias + head_of(r) * problem.bias_head_stride +
                                  query_of(r) * problem.bias_query_stride + tile;
        for (int64_t t = 0; t < tokens; ++t) row[t * token_step] += bias[t] * problem.bias_factor;
      }
      if (request.mask != nullptr) {
        const uint8_t* const mask = request.mask + head_of(r) * problem.mask_head_stride +
                                    query_of(r) * problem.mask_query_stride + tile;
        for (int64_t t = 0; t < tokens; ++t) {
          if (mask[t] != 0) row[t * token_step] = -kInfinity;
        }
      }
      const int64_t hidden_before = std::clamp<int64_t>(rows.first[r] - tile, 0, tokens);
      const int64_t hidden_from = std::clamp<int64_t>(rows.last[r] + 1 - tile, 0, tokens);
      for (int64_t t = 0; t < hidden_before; ++t) row[t * token_step] = -kInfinity;
      for (int64_t t = hidden_from; t < (few ? kTile : tokens); ++t)
        row[t * token_step] = -kInfinity;
    }
    if (few) {
      softmax_rows(rows, count, scores);
    } else {
      softmax_columns(rows, padded, scores, tokens);
    }

    for (int64_t r = 0; r < count; ++r) {
      if (rows.decay[r] == 1.0f) continue;
      for (int64_t d = 0; d < value_width; d += kFloats) {
        save(sums + r * value_width + d, load(sums + r * value_width + d) * rows.decay[r]);
      }
    }
    int64_t value_stride = shared ? key_stride : value_width;
    const float* const v = shared ? k
                                  : tile_rows(problem, request, request.value, piece.key_head, tile,
                                              tokens, true, values, &value_stride);
    multiply(scores, row_step, token_step, v, value_stride, sums, value_width, count, value_width,
             tokens, true);
  }

  for (int64_t r = 0; r < count; ++r) {
    float* const row = sums + r * value_width;
    // The result of a row that sees no key is zero, with the value that marks a void row as its
    // lse.
    const bool visible = rows.maximum[r] != -kInfinity && rows.first[r] <= rows.last[r];
    const float total = visible ? rows.total[r] : 1.0f;
    for (int64_t d = 0; d < value_width; d += kFloats) save(row + d, load(row + d) / total);
    narrow_row(problem.out_element, row, problem.value_size,
               request.out + head_of(r) * problem.out_head_stride +
                   query_of(r) * problem.out_token_stride);
    const int64_t at =
        head_of(r) * problem.lse_head_stride + query_of(r) * problem.lse_token_stride;
    if (request.lse != nullptr) {
      request.lse[at] = visible ? rows.maximum[r] + std::log(total) : kInfinity;
    }
    if (request.softmax_max != nullptr) request.softmax_max[at] = rows.maximum[r];
    if (request.softmax_sum != nullptr) request.softmax_sum[at] = visible ? total : 0.0f;
  }
}
