// Products of matrices of floats. Included once per vector width by attention_kernel_body.h, inside
// a namespace: no include guard.

constexpr int kColumns = kFloats == 16 ? 4 : 2;  // vectors per row of a block of the matrix product
constexpr int kRows = 6;  // its rows: kRows * kColumns sums stay in registers

// A block of c[m][n] (+)= sum over k of a[m][k] * b[k][n], kept in registers.
template <int M, int N>
inline void multiply_block(const float* a, int64_t a_row, int64_t a_column, const float* b,
                           int64_t b_row, float* c, int64_t c_row, int64_t depth, bool accumulate) {
  Vector sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      sums[m][n] = accumulate ? load(c + m * c_row + n * kFloats) : Vector{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load(b + k * b_row + n * kFloats);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vector factor = splat(a[m * a_row + k * a_column]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] += factor * columns[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) save(c + m * c_row + n * kFloats, sums[m][n]);
  }
}

template <int N>
void multiply_columns(const float* a, int64_t a_row, int64_t a_column, const float* b,
                      int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t depth,
                      bool accumulate) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) {
    multiply_block<kRows, N>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth,
                             accumulate);
  }
  for (; m + 2 <= rows; m += 2) {
    multiply_block<2, N>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth,
                         accumulate);
  }
  if (m < rows) {
    multiply_block<1, N>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth,
                         accumulate);
  }
}

// c[rows][columns] (+)= a * b, columns a multiple of the vector.
void multiply(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
              float* c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth,
              bool accumulate) {
  int64_t n = 0;
  for (; n + kColumns * kFloats <= columns; n += kColumns * kFloats) {
    multiply_columns<kColumns>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth,
                               accumulate);
  }
  for (; n < columns; n += kFloats) {
    multiply_columns<1>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth, accumulate);
  }
}

// scores[r][t] for few rows: products along the head dimension, `width` a multiple of the vector.
template <int R>
void score_rows(const float* query, int64_t query_row, const float* keys, int64_t key_row,
                int64_t tokens, int64_t width, float* scores, int64_t score_row) {
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4) {
    Vector sums[R][4] = {};
    for (int64_t d = 0; d < width; d += kFloats) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Vector k = load(keys + (t + j) * key_row + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][j] += load(query + r * query_row + d) * k;
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) scores[r * score_row + t + j] = sum(sums[r][j]);
    }
  }
  for (; t < tokens; ++t) {
    for (int r = 0; r < R; ++r) {
      Vector one{};
      for (int64_t d = 0; d < width; d += kFloats) {
        one += load(query + r * query_row + d) * load(keys + t * key_row + d);
      }
      scores[r * score_row + t] = sum(one);
    }
  }
}
