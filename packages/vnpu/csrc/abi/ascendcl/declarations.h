#pragma once

// CANN's own headers, from the torch_npu wheel: a definition that differs from them does not
// compile.
#define FUNC_VISIBILITY
#include "acl/acl.h"

#include "device/system.h"
#include "interface/status.h"

namespace vnpu::abi {

inline Executor& executor() { return System::instance().executor(); }

// Refuses `what`, a synchronous call, during a capture whose mode forbids it; see
// aclmdlRICaptureThreadExchangeMode. In graph.cpp.
void check_synchronous(const char* what);

}  // namespace vnpu::abi

// Every C function of this library: body in braces, exceptions become a status.
#define VNPU_ACL(NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) aclError NAME PARAMETERS
