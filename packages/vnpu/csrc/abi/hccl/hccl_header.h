#pragma once

// HCCL's own header, from the torch_npu wheel: a definition that differs does not compile.
#define FUNC_VISIBILITY
#include "third_party/hccl/inc/hccl/hccl.h"
