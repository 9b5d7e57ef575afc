#pragma once

// Products of 8-bit and 4-bit integer matrices, exact as on the device: sums are int32.

#include "ops/matmul/fractal_layout.h"
#include "ops/operator.h"

namespace vnpu::ops {

// a [..., m, k] and b [..., k, n], int8 -> int32 [..., m, n].
Tensor multiply_integers(const Tensor& a, const Tensor& b);

// Eight 4-bit integers lie in each int32, the first in the lowest bits: [..., n] -> int8 [..., 8
// n].
Tensor unpack_int4(const Tensor& packed);
// The inverse, for int8 values in [-8, 7].
Tensor pack_int4(const Tensor& values);

// A matrix of integers as int8. int32 memory holds 4-bit integers, packed along the dimension that
// is contiguous; `rows`: the matrix's number of rows, by which a transposed one, packed along its
// rows, is recognized.
Tensor integer_matrix(const Tensor& matrix, int64_t rows);

// Scales as float32. 64-bit integers have aclnnTransQuantParam's format: a float's bits in the low
// half.
Tensor float_scales(const Tensor& scales);

// 8-bit rows by 4-bit weights [k, n] as int8, which have scales [n], or [groups, n] along the
// depth. The matrix unit multiplies 4-bit integers with each other: an entry of a row is split into
// 16 a + b + 8, with signed a and b. Products of a and b are summed over the groups in float16; the
// products of the 8s are the caller's `of_eights`, [n]. Returns float32.
Tensor multiply_halves(const Tensor& rows, const Tensor& weight, const Tensor& scales,
                       const Tensor& of_eights);

// A weight in any layout: in tiles by its format, or with the tiles as dimensions [experts, columns
// / c, rows / 16, 16, c].
Tensor dense_weight(const LaidOut& weight);

}  // namespace vnpu::ops
