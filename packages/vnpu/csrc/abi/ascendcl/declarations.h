#pragma once

// CANN's own headers, from the torch_npu wheel: a definition that differs from them does not
// compile.
#define FUNC_VISIBILITY
#include "acl/acl.h"

#include "abi/status.h"

// Every C function of this library: body in braces, exceptions become a status.
#define VNPU_ACL(NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) aclError NAME PARAMETERS
