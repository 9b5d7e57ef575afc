#pragma once

// Arithmetic on rows of float32, for operators that a model calls several times per layer: one pass
// over the memory instead of one per ATen operator. Rows of 16-bit floats are loaded to float32 and
// rounded once, on store.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace vnpu::ops::float_rows {

void load(const float* row, float* out, int64_t count);
void load(const at::BFloat16* row, float* out, int64_t count);
void load(const at::Half* row, float* out, int64_t count);

void store(const float* row, float* out, int64_t count);
void store(const float* row, at::BFloat16* out, int64_t count);
void store(const float* row, at::Half* out, int64_t count);

void add(const float* a, const float* b, float* out, int64_t count);
// out = row * factor, rounded
void multiply(const float* row, float factor, float* out, int64_t count);
float sum_of_squares(const float* row, int64_t count);
// The index of the first of the greatest; -1 where there is a NaN, or nothing at all.
int64_t argmax(const float* row, int64_t count);
// out = row * factor * weight
void scale(const float* row, float factor, const float* weight, float* out, int64_t count);
// out = a * sigmoid(a) * b
void silu_multiply(const float* a, const float* b, float* out, int64_t count);

}  // namespace vnpu::ops::float_rows
