// Graphs that are built from streams that a program binds to them, and labels between which they
// branch. Source: hicann/runtime docs/zh/api_ref/10 and 15.

#include <set>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/graphs.h"
#include "device/memory.h"

using namespace vnpu;
using abi::executor;
using abi::Graphs;
using abi::guarded;

namespace {

constexpr size_t kMostLabels = 65535;  // of a process, and of a list

struct Label {
  GraphLabelPtr place = std::make_shared<GraphLabel>();
};

using LabelList = std::vector<GraphLabelPtr>;

// What has a handle, which is its address.
template <class T>
class Handles {
 public:
  static Handles& instance() {
    static auto* const handles = new Handles();
    return *handles;
  }
  T* add(T made, size_t most) {
    const std::lock_guard lock(mutex_);
    if (live_.size() >= most) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: a process has at most " + std::to_string(most) + " labels.");
    }
    return *live_.insert(new T(std::move(made))).first;
  }
  const T& find(void* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(static_cast<T*>(handle));
    if (found == live_.end()) {
      throw Failure(FailureKind::kInvalidHandle,
                    "vnpu: this is no live label, or list of labels (destroyed before its last "
                    "use?).");
    }
    return **found;
  }
  void remove(void* handle) {
    find(handle);
    const std::lock_guard lock(mutex_);
    live_.erase(static_cast<T*>(handle));
    delete static_cast<T*>(handle);
  }

 private:
  std::mutex mutex_;
  std::set<T*> live_;
};

void require(bool condition, const std::string& message) {
  if (!condition) throw Failure(FailureKind::kInvalidArgument, "vnpu: " + message);
}

}  // namespace

VNPU_ACL(aclmdlRIBuildBegin, (aclmdlRI * model, uint32_t flag)) {
  return guarded("aclmdlRIBuildBegin", [&] {
    require(model != nullptr && flag == 0, "a graph is built with flag 0, and has a handle.");
    const GraphPtr graph = executor().begin_build(System::instance().require_current_device());
    Graphs::instance().add(graph);
    *model = graph.get();
  });
}
VNPU_ACL(aclmdlRIBindStream, (aclmdlRI model, aclrtStream stream, uint32_t flag)) {
  return guarded("aclmdlRIBindStream", [&] {
    require(stream != nullptr, "the default stream is bound to no graph. Create a stream.");
    const StreamPtr& bound = abi::stream_of(stream);
    require((bound->flags & ACL_STREAM_PERSISTENT) != 0,
            "a stream with flags " + std::to_string(bound->flags) +
                " is bound to a graph; create it with ACL_STREAM_PERSISTENT.");
    require(flag == ACL_MODEL_STREAM_FLAG_HEAD || flag == ACL_MODEL_STREAM_FLAG_DEFAULT,
            "a stream is bound to a graph with flag " + std::to_string(flag) +
                "; ACL_MODEL_STREAM_FLAG_HEAD and _DEFAULT are.");
    executor().bind(bound, Graphs::instance().find(model), flag == ACL_MODEL_STREAM_FLAG_HEAD);
  });
}
VNPU_ACL(aclmdlRIEndTask, (aclmdlRI model, aclrtStream stream)) {
  return guarded("aclmdlRIEndTask", [&] {
    executor().end_tasks(abi::stream_of(stream), Graphs::instance().find(model));
  });
}
VNPU_ACL(aclmdlRIBuildEnd, (aclmdlRI model, void* reserved)) {
  return guarded("aclmdlRIBuildEnd", [&] {
    require(reserved == nullptr, "the second argument of aclmdlRIBuildEnd is reserved: null.");
    executor().end_build(Graphs::instance().find(model));
  });
}
VNPU_ACL(aclmdlRIUnbindStream, (aclmdlRI model, aclrtStream stream)) {
  return guarded("aclmdlRIUnbindStream", [&] {
    executor().unbind(abi::stream_of(stream), Graphs::instance().find(model));
  });
}

VNPU_ACL(aclrtCreateLabel, (aclrtLabel * label)) {
  return guarded("aclrtCreateLabel", [&] {
    require(label != nullptr, "there is no place for a label's handle.");
    *label = Handles<Label>::instance().add({}, kMostLabels);
  });
}
VNPU_ACL(aclrtSetLabel, (aclrtLabel label, aclrtStream stream)) {
  return guarded("aclrtSetLabel", [&] {
    executor().set_label(abi::stream_of(stream), Handles<Label>::instance().find(label).place);
  });
}
VNPU_ACL(aclrtDestroyLabel, (aclrtLabel label)) {
  return guarded("aclrtDestroyLabel", [&] { Handles<Label>::instance().remove(label); });
}
VNPU_ACL(aclrtCreateLabelList, (aclrtLabel * labels, size_t count, aclrtLabelList* list)) {
  return guarded("aclrtCreateLabelList", [&] {
    require(labels != nullptr && list != nullptr && count > 0 && count <= kMostLabels,
            "a list of " + std::to_string(count) + " labels; it has 1 to " +
                std::to_string(kMostLabels) + ", and a handle.");
    LabelList made;
    for (size_t i = 0; i < count; ++i) {
      made.push_back(Handles<Label>::instance().find(labels[i]).place);
    }
    *list = Handles<LabelList>::instance().add(std::move(made), kMostLabels);
  });
}
VNPU_ACL(aclrtDestroyLabelList, (aclrtLabelList list)) {
  return guarded("aclrtDestroyLabelList", [&] { Handles<LabelList>::instance().remove(list); });
}
VNPU_ACL(aclrtSwitchLabelByIndex,
         (void* index, uint32_t count, aclrtLabelList list, aclrtStream stream)) {
  return guarded("aclrtSwitchLabelByIndex", [&] {
    const LabelList& labels = Handles<LabelList>::instance().find(list);
    require(count == labels.size(), "a switch between " + std::to_string(count) +
                                        " labels of a list of " + std::to_string(labels.size()) +
                                        ".");
    Memory::instance().check(index, sizeof(uint32_t), "aclrtSwitchLabelByIndex");
    const StreamPtr& target = abi::stream_of(stream);
    const GraphPtr graph = executor().capture_of(target);
    require(graph != nullptr && graph->bound.has_value(),
            "a switch is launched on a stream that is bound to no graph.");
    executor().submit(target, std::make_shared<LabelSwitch>(index, labels));
  });
}
