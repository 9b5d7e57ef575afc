// Sizes of data types and conversions of float16, for programs that have no library of their own.

#include <cstring>

#include "abi/ascendcl/declarations.h"

#define VNPU_C(TYPE) extern "C" __attribute__((visibility("default"))) TYPE

// Bytes of one number; types of less than a byte count as one.
VNPU_C(size_t) aclDataTypeSize(aclDataType type) {
  switch (type) {
    case ACL_DT_UNDEFINED:
    case ACL_STRING: return 0;
    case ACL_UINT1:
    case ACL_INT4:
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0: return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16: return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32: return 4;
    case ACL_COMPLEX128: return 16;
    default: return 8;
  }
}

VNPU_C(float) aclFloat16ToFloat(aclFloat16 value) {
  _Float16 number;
  std::memcpy(&number, &value, sizeof(number));
  return static_cast<float>(number);
}
VNPU_C(aclFloat16) aclFloatToFloat16(float value) {
  const auto number = static_cast<_Float16>(value);
  aclFloat16 bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}
