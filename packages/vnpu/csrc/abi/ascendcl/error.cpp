// Error texts.

#include "abi/ascendcl/declarations.h"

extern "C" __attribute__((visibility("default"))) const char* aclGetRecentErrMsg() {
  return vnpu::abi::recent_error();
}
VNPU_ACL(aclrtPeekAtLastError, (aclrtLastErrLevel)) { return 0; }
VNPU_ACL(aclrtGetLastError, (aclrtLastErrLevel)) { return 0; }

extern "C" __attribute__((visibility("default"))) void aclAppLog(aclLogLevel, const char*,
                                                                 const char*, uint32_t, const char*,
                                                                 ...) {
  // torch_npu mirrors its own log here; it already prints what matters.
}
