// libopapi: operators of the older interface (aclop), for libacl_op_compiler.

#include "device/system.h"
#include "interface/legacy_call.h"
#include "interface/status.h"
#include "ops/legacy/legacy_operator.h"

using namespace vnpu;

extern "C" __attribute__((visibility("default"))) int vnpuRunLegacy(const abi::LegacyCall& call,
                                                                    void* stream) {
  bool exists = true;
  const int status = abi::guarded(call.type, [&] {
    const TaskPtr task = ops::legacy_task(call);
    exists = task != nullptr;
    if (exists) System::instance().executor().submit(abi::stream_of(stream), task);
  });
  return exists ? status : abi::kNoSuchOperator;
}
