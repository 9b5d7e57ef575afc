// HCCL's data types and reductions in those of the device.

#include <string>

#include "abi/hccl/communicator.h"

namespace vnpu::abi {

ElementType element_type(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return ElementType::kInt8;
    case HCCL_DATA_TYPE_INT16: return ElementType::kInt16;
    case HCCL_DATA_TYPE_INT32: return ElementType::kInt32;
    case HCCL_DATA_TYPE_FP16: return ElementType::kFloat16;
    case HCCL_DATA_TYPE_FP32: return ElementType::kFloat32;
    case HCCL_DATA_TYPE_INT64: return ElementType::kInt64;
    case HCCL_DATA_TYPE_UINT64: return ElementType::kUint64;
    case HCCL_DATA_TYPE_UINT8: return ElementType::kUint8;
    case HCCL_DATA_TYPE_UINT16: return ElementType::kUint16;
    case HCCL_DATA_TYPE_UINT32: return ElementType::kUint32;
    case HCCL_DATA_TYPE_FP64: return ElementType::kFloat64;
    case HCCL_DATA_TYPE_BFP16: return ElementType::kBfloat16;
    case HCCL_DATA_TYPE_INT128: return ElementType::kInt128;
    case HCCL_DATA_TYPE_HIF8: return ElementType::kHifloat8;
    case HCCL_DATA_TYPE_FP8E4M3: return ElementType::kFloat8E4m3;
    case HCCL_DATA_TYPE_FP8E5M2: return ElementType::kFloat8E5m2;
    case HCCL_DATA_TYPE_FP8E8M0: return ElementType::kFloat8E8m0;
    case HCCL_DATA_TYPE_RESERVED: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: there is no HCCL data type " + std::to_string(type) + ".");
}

Reduction reduction(HcclReduceOp operation) {
  switch (operation) {
    case HCCL_REDUCE_SUM: return Reduction::kSum;
    case HCCL_REDUCE_PROD: return Reduction::kProduct;
    case HCCL_REDUCE_MAX: return Reduction::kMaximum;
    case HCCL_REDUCE_MIN: return Reduction::kMinimum;
    case HCCL_REDUCE_RESERVED: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: there is no HCCL reduction " + std::to_string(operation) + ".");
}

}  // namespace vnpu::abi
