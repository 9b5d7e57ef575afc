// Graph capture and replay (aclmdlRI).

#include <map>
#include <mutex>
#include <utility>

#include "abi/ascendcl/declarations.h"
#include "device/system.h"

using namespace vnpu;
using abi::guarded;

namespace {

Executor& executor() { return System::instance().executor(); }

// Graphs that have a handle (an aclmdlRI is the Graph's address).
class Graphs {
 public:
  static Graphs& instance() {
    static Graphs* const graphs = new Graphs();
    return *graphs;
  }
  void add(const GraphPtr& graph) {
    std::lock_guard lock(mutex_);
    live_[graph.get()] = graph;
  }
  GraphPtr find(aclmdlRI handle) {
    std::lock_guard lock(mutex_);
    const auto it = live_.find(handle);
    if (it == live_.end()) {
      throw Failure(FailureKind::kInvalidHandle, "vnpu: this is not a live graph.");
    }
    return it->second;
  }
  void remove(aclmdlRI handle) {
    find(handle);
    std::lock_guard lock(mutex_);
    live_.erase(handle);  // replays that are under way keep their own reference
  }

 private:
  std::mutex mutex_;
  std::map<const void*, GraphPtr> live_;
};

using GroupPtr = std::shared_ptr<Graph::TaskGroup>;

}  // namespace

VNPU_ACL(aclmdlRICaptureBegin, (aclrtStream stream, aclmdlRICaptureMode)) {
  return guarded("aclmdlRICaptureBegin",
                 [&] { Graphs::instance().add(executor().begin_capture(abi::stream_of(stream))); });
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
  thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(current, *mode);
  return 0;
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
