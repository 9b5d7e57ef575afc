#pragma once

// A stage of a layer: several operators that are launched by one call.
//
//   Stage stage("mla_preprocess");
//   stage.run(kRmsNorm, x, gamma, epsilon, y, rstd);   // phase one of an operator
//   stage.run(kMm, y, weight, out, kKeepDtype);
//   stage.submit();                                    // phase two of all, in this order
//
// Phase one checks the arguments, on the calling thread; nothing is launched unless all of them
// pass. submit() hands the launches to torch_npu as one entry of its task queue (or runs them at
// once where there is no queue), so they run in order with torch_npu's own operators.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "launch/handles.h"
#include "launch/symbols.h"

namespace davinci {

// Treatment of fp32 operands in matrix products. Source: cubeMathType of aclnnMm.
inline constexpr int8_t kKeepDtype = 0;

class Stage {
 public:
  // On the current stream of the device of `tensor`. `name` is a literal.
  Stage(const char* name, const at::Tensor& tensor);
  ~Stage();
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  template <class... A>
  void run(Operator& op, const A&... arguments) {
    Batch& batch = *batch_;
    use_cores_of(current_);
    void* const prepare = op.prepare();
    // Braces fix the order in which handles are made.
    const auto c = std::tuple{Argument<A>::c(batch.handles, arguments)...};
    uint64_t workspace_bytes = 0;
    aclOpExecutor* executor = nullptr;
    const int status = std::apply(
        [&](auto... value) {
          using Prepare = int (*)(decltype(value)..., uint64_t*, aclOpExecutor**);
          return reinterpret_cast<Prepare>(prepare)(value..., &workspace_bytes, &executor);
        },
        c);
    if (status != 0) refuse(op, status);
    add(op, workspace_bytes, executor);
  }

  // Handles that live until the launches are made.
  Handles& handles() { return batch_->handles; }

  // Copies bytes from device memory to device memory.
  void copy(void* destination, const void* source, size_t bytes);

  // A stream of torch as CANN's.
  static void* handle(const c10::Stream& stream);
  // Later launches run on `stream`, or on the stage's own stream again.
  void use(void* stream) { current_ = stream; }
  void use_own() { current_ = own_; }
  // `waiting` waits for all launches on the stage's current stream so far.
  void let_wait(void* waiting);
  void* own_stream() const { return own_; }

  // Later launches, on a capturing stream, form a task group of the graph. `group` gets its handle
  // when the launches have been made.
  void begin_group() { mark(Step::Kind::kGroupBegin, nullptr); }
  void end_group(std::shared_ptr<void*> group) { mark(Step::Kind::kGroupEnd, std::move(group)); }
  // Later launches replace the tasks of that group.
  void begin_update(std::shared_ptr<void*> group) {
    mark(Step::Kind::kUpdateBegin, std::move(group));
  }
  void end_update() { mark(Step::Kind::kUpdateEnd, nullptr); }
  // The newest launch uses this workspace, which outlives the launch's task.
  void use_workspace(const View& workspace);

  void submit();

  // Operators launched by all stages of this process so far.
  static uint64_t launch_count();

 private:
  struct Step {
    enum class Kind : uint8_t {
      kLaunch,
      kCopy,
      kRecord,
      kWait,
      kGroupBegin,
      kGroupEnd,
      kUpdateBegin,
      kUpdateEnd,
    } kind;
    Operator* op;
    aclOpExecutor* executor;
    uint64_t workspace_bytes;  // requested by the operator; bytes of a copy
    void* stream;
    void* destination;  // target of a copy; event of a record or a wait
    const void* source;
    std::shared_ptr<void*> group = nullptr;
    void* workspace = nullptr;
    bool lacks_workspace() const {
      return kind == Kind::kLaunch && workspace_bytes > 0 && workspace == nullptr;
    }
  };
  struct Batch {
    ~Batch();
    int launch();
    // Returns the memory, which has to live until all steps are launched.
    std::vector<at::Tensor> place_workspaces(bool captures);
    const char* name;
    c10::DeviceIndex device;
    Handles handles;
    std::vector<Step> steps;
    size_t done = 0;
  };
  // Tells phase one how many cores the stream may use (torch.npu.set_stream_limit).
  static void use_cores_of(void* stream);
  [[noreturn]] void refuse(const Operator& op, int status) const;
  void add(Operator& op, uint64_t workspace_bytes, aclOpExecutor* executor);
  void mark(Step::Kind kind, std::shared_ptr<void*> group) {
    batch_->steps.push_back(
        {kind, nullptr, nullptr, 0, current_, nullptr, nullptr, std::move(group)});
  }

  const char* name_;
  c10::DeviceIndex device_;
  void* own_;
  void* current_;
  size_t next_event_ = 0;
  std::shared_ptr<Batch> batch_;
};

// Memory for intermediate results of a stage: one allocation, cut into pieces.
class Scratch {
 public:
  struct Piece {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
  };
  Scratch(const at::Tensor& like, std::initializer_list<Piece> pieces);
  const View& operator[](size_t index) const { return views_[index]; }

 private:
  c10::DataPtr memory_;
  std::vector<View> views_;
};

// A new tensor on the device of `like`.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like);

}  // namespace davinci
