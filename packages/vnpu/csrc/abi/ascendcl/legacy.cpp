// The older operator interface (aclop), and symbols that libtorch_npu imports but never uses here.
// libacl_op_compiler passes descriptors, buffers and attributes to the operators of this interface
// (ops/legacy).

#include <cstring>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/legacy.h"

using vnpu::FailureKind;

namespace {

aclError unsupported(const char* function) {
  return vnpu::abi::report(FailureKind::kNotSupported, std::string("vnpu: ") + function +
                                                           " is not available on a virtual NPU.");
}

aclError keep(aclopAttr* attr, const char* name, vnpu::abi::LegacyAttribute value) {
  attr->values.insert_or_assign(name, std::move(value));
  return 0;
}

template <class Kept, class Value>
std::vector<Kept> listed(int count, const Value* values) {
  return {values, values + count};
}

}  // namespace

#define VNPU_C(TYPE) extern "C" __attribute__((visibility("default"))) TYPE

VNPU_C(aclDataBuffer*) aclCreateDataBuffer(void* data, size_t bytes) {
  return new aclDataBuffer{data, bytes};
}
VNPU_ACL(aclDestroyDataBuffer, (const aclDataBuffer* buffer)) {
  delete buffer;
  return 0;
}
VNPU_C(aclTensorDesc*)
aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  const std::vector<int64_t> sizes(dims, dims + count);
  return new aclTensorDesc{type, format, sizes, {}, format, sizes};
}
VNPU_C(void) aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
VNPU_C(aclDataType) aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
VNPU_C(aclFormat) aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
VNPU_C(size_t) aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
VNPU_ACL(aclGetTensorDescDimV2, (const aclTensorDesc* desc, size_t index, int64_t* size)) {
  if (index >= desc->dims.size()) {
    return vnpu::abi::report(FailureKind::kInvalidArgument, "vnpu: no such dimension.");
  }
  *size = desc->dims[index];
  return 0;
}
VNPU_C(void) aclSetTensorDescName(aclTensorDesc* desc, const char* name) { desc->name = name; }
VNPU_ACL(aclSetTensorFormat, (aclTensorDesc * desc, aclFormat format)) {
  desc->storage_format = format;
  return 0;
}
VNPU_ACL(aclSetTensorShape, (aclTensorDesc * desc, int count, const int64_t* dims)) {
  desc->storage_dims.assign(dims, dims + count);
  return 0;
}
VNPU_ACL(aclSetTensorPlaceMent, (aclTensorDesc * desc, aclMemType placement)) {
  desc->placement = placement;
  return 0;
}

VNPU_C(aclopAttr*) aclopCreateAttr() { return new aclopAttr(); }
VNPU_C(void) aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
VNPU_ACL(aclopSetAttrBool, (aclopAttr * a, const char* n, uint8_t value)) {
  return keep(a, n, value != 0);
}
VNPU_ACL(aclopSetAttrInt, (aclopAttr * a, const char* n, int64_t value)) {
  return keep(a, n, value);
}
VNPU_ACL(aclopSetAttrFloat, (aclopAttr * a, const char* n, float value)) {
  return keep(a, n, static_cast<double>(value));
}
VNPU_ACL(aclopSetAttrString, (aclopAttr * a, const char* n, const char* value)) {
  return keep(a, n, std::string(value));
}
VNPU_ACL(aclopSetAttrDataType, (aclopAttr * a, const char* n, aclDataType value)) {
  return keep(a, n, static_cast<int64_t>(value));
}
VNPU_ACL(aclopSetAttrListBool, (aclopAttr * a, const char* n, int count, const uint8_t* values)) {
  return keep(a, n, listed<int64_t>(count, values));
}
VNPU_ACL(aclopSetAttrListInt, (aclopAttr * a, const char* n, int count, const int64_t* values)) {
  return keep(a, n, listed<int64_t>(count, values));
}
VNPU_ACL(aclopSetAttrListFloat, (aclopAttr * a, const char* n, int count, const float* values)) {
  return keep(a, n, listed<double>(count, values));
}
// No operator that runs here has such an attribute.
VNPU_ACL(aclopSetAttrListListInt,
         (aclopAttr*, const char*, int, const int*, const int64_t* const*)) {
  return 0;
}

VNPU_ACL(aclmdlInitDump, ()) { return unsupported("aclmdlInitDump"); }
VNPU_ACL(aclmdlSetDump, (const char*)) { return unsupported("aclmdlSetDump"); }
VNPU_ACL(aclmdlFinalizeDump, ()) { return unsupported("aclmdlFinalizeDump"); }
VNPU_ACL(aclrtBinaryLoadFromData,
         (const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*)) {
  return unsupported("aclrtBinaryLoadFromData");
}
VNPU_ACL(aclrtBinaryGetFunction, (const aclrtBinHandle, const char*, aclrtFuncHandle*)) {
  return unsupported("aclrtBinaryGetFunction");
}
VNPU_ACL(aclrtGetFunctionAddr, (aclrtFuncHandle, void**, void**)) {
  return unsupported("aclrtGetFunctionAddr");
}

// Runtime entry points for device binaries: a virtual NPU has no instruction set to run them on.
VNPU_C(int32_t) rtDevBinaryRegister(const void*, void**) {
  return unsupported("rtDevBinaryRegister");
}
VNPU_C(int32_t) rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
  return unsupported("rtFunctionRegister");
}
VNPU_C(int32_t) rtKernelLaunch(const void*, uint32_t, void*, uint32_t, void*, void*) {
  return unsupported("rtKernelLaunch");
}
VNPU_C(int32_t) rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return unsupported("rtGetC2cCtrlAddr"); }

// Profiling reports are ignored.
VNPU_C(uint64_t) MsprofGetHashId(const char*, size_t) { return 0; }
VNPU_C(int32_t) MsprofRegisterCallback(uint32_t, void*) { return 0; }
VNPU_C(int32_t) MsprofReportApi(uint32_t, const void*) { return 0; }
VNPU_C(int32_t) MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
VNPU_C(int32_t) MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
VNPU_C(uint64_t) MsprofSysCycleTime() { return 0; }
