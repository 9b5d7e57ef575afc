// Graph capture and replay (aclmdlRI).

#include <utility>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/graphs.h"
#include "device/system.h"

using namespace vnpu;
using abi::executor;
using abi::Graphs;
using abi::guarded;

namespace {

using GroupPtr = std::shared_ptr<Graph::TaskGroup>;

CaptureMode mode_of(aclmdlRICaptureMode mode) {
  switch (mode) {
    case ACL_MODEL_RI_CAPTURE_MODE_GLOBAL: return CaptureMode::kGlobal;
    case ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL: return CaptureMode::kThreadLocal;
    case ACL_MODEL_RI_CAPTURE_MODE_RELAXED: return CaptureMode::kRelaxed;
    default: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: capture mode " + std::to_string(static_cast<int>(mode)) +
                    " is not known; global (0), thread local (1) and relaxed (2) are.");
}

thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

}  // namespace

void vnpu::abi::check_synchronous(const char* what) {
  executor().check_synchronous(mode_of(thread_mode), what);
}

VNPU_ACL(aclmdlRICaptureBegin, (aclrtStream stream, aclmdlRICaptureMode mode)) {
  return guarded("aclmdlRICaptureBegin", [&] {
    if (stream == nullptr) {
      throw CaptureFailure(CaptureRule::kDefaultStream,
                           "vnpu: the default stream cannot be captured. Create a stream.");
    }
    Graphs::instance().add(executor().begin_capture(abi::stream_of(stream), mode_of(mode)));
  });
}
VNPU_ACL(aclmdlRICaptureGetInfo,
         (aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* model)) {
  return guarded("aclmdlRICaptureGetInfo", [&] {
    const GraphPtr graph = executor().capture_of(abi::stream_of(stream));
    if (status != nullptr) {
      *status =
          graph == nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_NONE : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    }
    if (model != nullptr) *model = graph == nullptr ? nullptr : graph.get();
  });
}
VNPU_ACL(aclmdlRICaptureEnd, (aclrtStream stream, aclmdlRI* model)) {
  return guarded("aclmdlRICaptureEnd",
                 [&] { *model = executor().end_capture(abi::stream_of(stream)).get(); });
}
VNPU_ACL(aclmdlRIExecuteAsync, (aclmdlRI model, aclrtStream stream)) {
  return guarded("aclmdlRIExecuteAsync", [&] {
    executor().submit(abi::stream_of(stream),
                      std::make_shared<GraphReplay>(Graphs::instance().find(model)));
  });
}
VNPU_ACL(aclmdlRIDestroy, (aclmdlRI model)) {
  return guarded("aclmdlRIDestroy", [&] { Graphs::instance().remove(model); });
}
VNPU_ACL(aclmdlRIGetId, (aclmdlRI model, uint32_t* id)) {
  return guarded("aclmdlRIGetId", [&] { *id = Graphs::instance().find(model)->id; });
}
VNPU_ACL(aclmdlRICaptureThreadExchangeMode, (aclmdlRICaptureMode * mode)) {
  return guarded("aclmdlRICaptureThreadExchangeMode", [&] {
    mode_of(*mode);
    std::swap(thread_mode, *mode);
  });
}
VNPU_ACL(aclmdlRICaptureTaskGrpBegin, (aclrtStream stream)) {
  return guarded("aclmdlRICaptureTaskGrpBegin",
                 [&] { executor().begin_group(abi::stream_of(stream)); });
}
VNPU_ACL(aclmdlRICaptureTaskGrpEnd, (aclrtStream stream, aclrtTaskGrp* group)) {
  return guarded("aclmdlRICaptureTaskGrpEnd", [&] {
    // Lives as long as the process: torch_npu has no call that gives a group back.
    *group = new GroupPtr(executor().end_group(abi::stream_of(stream)));
  });
}
VNPU_ACL(aclmdlRICaptureTaskUpdateBegin, (aclrtStream stream, aclrtTaskGrp group)) {
  return guarded("aclmdlRICaptureTaskUpdateBegin", [&] {
    executor().begin_update(abi::stream_of(stream), *static_cast<GroupPtr*>(group));
  });
}
VNPU_ACL(aclmdlRICaptureTaskUpdateEnd, (aclrtStream stream)) {
  return guarded("aclmdlRICaptureTaskUpdateEnd",
                 [&] { executor().end_update(abi::stream_of(stream)); });
}
