// The older operator interface (aclop) and what libtorch_npu imports but never needs here.
// Descriptors and buffers are real; of operators that run this way there is Identity
// (abi/acl_op_compiler), every other one is an aclnn one here.

#include <cstring>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/legacy.h"

using vnpu::FailureKind;

struct aclopAttr {
  std::vector<std::string> names;
};

namespace {

aclError unsupported(const char* function) {
  return vnpu::abi::report(FailureKind::kNotSupported, std::string("vnpu: ") + function +
                                                           " is not available on a virtual NPU.");
}

aclError keep(aclopAttr* attr, const char* name) {
  attr->names.emplace_back(name);
  return 0;
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
VNPU_ACL(aclSetTensorPlaceMent, (aclTensorDesc*, aclMemType)) { return 0; }

VNPU_C(aclopAttr*) aclopCreateAttr() { return new aclopAttr(); }
VNPU_C(void) aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
VNPU_ACL(aclopSetAttrBool, (aclopAttr * a, const char* n, uint8_t)) { return keep(a, n); }
VNPU_ACL(aclopSetAttrInt, (aclopAttr * a, const char* n, int64_t)) { return keep(a, n); }
VNPU_ACL(aclopSetAttrFloat, (aclopAttr * a, const char* n, float)) { return keep(a, n); }
VNPU_ACL(aclopSetAttrString, (aclopAttr * a, const char* n, const char*)) { return keep(a, n); }
VNPU_ACL(aclopSetAttrDataType, (aclopAttr * a, const char* n, aclDataType)) { return keep(a, n); }
VNPU_ACL(aclopSetAttrListBool, (aclopAttr * a, const char* n, int, const uint8_t*)) {
  return keep(a, n);
}
VNPU_ACL(aclopSetAttrListInt, (aclopAttr * a, const char* n, int, const int64_t*)) {
  return keep(a, n);
}
VNPU_ACL(aclopSetAttrListFloat, (aclopAttr * a, const char* n, int, const float*)) {
  return keep(a, n);
}
VNPU_ACL(aclopSetAttrListListInt,
         (aclopAttr * a, const char* n, int, const int*, const int64_t* const*)) {
  return keep(a, n);
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

// Profiling reports: nobody listens.
VNPU_C(uint64_t) MsprofGetHashId(const char*, size_t) { return 0; }
VNPU_C(int32_t) MsprofRegisterCallback(uint32_t, void*) { return 0; }
VNPU_C(int32_t) MsprofReportApi(uint32_t, const void*) { return 0; }
VNPU_C(int32_t) MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
VNPU_C(int32_t) MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
VNPU_C(uint64_t) MsprofSysCycleTime() { return 0; }
