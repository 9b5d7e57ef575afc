#pragma once

#include <cstddef>
#include <cstdint>

namespace vnpu {

// Element types that collectives carry.
enum class ElementType : uint32_t {
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kInt128,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kHifloat8,
  kFloat8E4m3,
  kFloat8E5m2,
  kFloat8E8m0,
};

enum class Reduction : uint32_t { kSum, kProduct, kMaximum, kMinimum };

size_t size_of(ElementType type);
const char* name_of(ElementType type);
const char* name_of(Reduction reduction);
// False for the 8-bit floats and int128, which collectives only move.
bool can_reduce(ElementType type);

}  // namespace vnpu
