// Included once per vector width by block_kernel.cpp, inside a namespace: no include guard.

constexpr int kFloats = VNPU_VECTOR_FLOATS;
constexpr int kVectors = 2;  // of the columns that one call of `tile` computes
constexpr int kRows = 4;     // kRows * kVectors sums and a row of the block stay in 16 registers

typedef float Vector __attribute__((vector_size(kFloats * 4)));
typedef float Unaligned __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));

inline float widen(at::BFloat16 value) { return static_cast<float>(value); }

// sums[r][v] += rows[r][k] * block[k][v], for one row of a block of floats (step 1), or for a pair
// of rows of 16-bit floats.
template <int R>
inline void add_products(Vector (&sums)[R][kVectors], const float* rows, int64_t row_stride,
                         const float* block) {
  for (int v = 0; v < kVectors; ++v) {
    const Vector weight = *reinterpret_cast<const Unaligned*>(block + v * kFloats);
    for (int r = 0; r < R; ++r) sums[r][v] += weight * rows[r * row_stride];
  }
}

template <int R>
inline void add_products(Vector (&sums)[R][kVectors], const at::BFloat16* rows, int64_t row_stride,
                         const at::BFloat16* block) {
  for (int v = 0; v < kVectors; ++v) {
    const Words pairs = *reinterpret_cast<const Words*>(block + 2 * v * kFloats);
    const Vector first = reinterpret_cast<Vector>(pairs << 16);
    const Vector second = reinterpret_cast<Vector>(pairs & 0xffff0000u);
    for (int r = 0; r < R; ++r) sums[r][v] += first * widen(rows[r * row_stride]);
    for (int r = 0; r < R; ++r) sums[r][v] += second * widen(rows[r * row_stride + 1]);
  }
}

template <int R, class Element>
inline void tile(const BlockProduct& product, const Element* rows, const Element* block,
                 float* to) {
  constexpr int64_t kDepth = sizeof(float) / sizeof(Element);  // rows of the block at a time
  Vector sums[R][kVectors] = {};
  for (int64_t k = 0; k < product.depth; k += kDepth) {
    add_products<R>(sums, rows + k, product.row_stride, block + k * product.columns);
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<Unaligned*>(to + r * product.columns + v * kFloats) = sums[r][v];
    }
  }
}

// Tiles of R rows as long as enough are left, then of fewer.
template <int R, class Element>
inline void tiles(const BlockProduct& product, int64_t first, const Element* rows,
                  const Element* block, float* sums) {
  constexpr int64_t kPair = sizeof(float) / sizeof(Element);
  for (; first + R <= product.rows; first += R) {
    for (int64_t column = 0; column < product.columns; column += kVectors * kFloats) {
      tile<R>(product, rows + first * product.row_stride, block + column * kPair,
              sums + first * product.columns + column);
    }
  }
  if constexpr (R > 1) tiles<R - 1>(product, first, rows, block, sums);
}

template <class Element>
void multiply(const BlockProduct& product, const Element* rows, const Element* block, float* sums) {
  tiles<kRows>(product, 0, rows, block, sums);
}
