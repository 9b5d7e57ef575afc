#include "launch/stage.h"

#include <ATen/ops/empty.h>
#include <acl/acl_rt.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/core/npu/NPUWorkspaceAllocator.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <algorithm>
#include <atomic>

// Declared in acl.h, which pulls in much more.
extern "C" const char* aclGetRecentErrMsg();

namespace davinci {
namespace {

using Launch = int (*)(void*, uint64_t, aclOpExecutor*, aclrtStream);

// Pieces of scratch memory begin at multiples of kAlignmentBytes and end with kTailBytes, because
// operators may read beyond a tensor. Source: aclrtMalloc's documentation, on dividing its memory.
constexpr int64_t kAlignmentBytes = 512;
constexpr int64_t kTailBytes = 32;
constexpr size_t kEvents = 8;  // most events of one stage on one device
constexpr int kMaxDevices = 64;

std::atomic<uint64_t> launched{0};

std::string recent_error() {
  const char* const text = aclGetRecentErrMsg();
  return text == nullptr || *text == '\0' ? "no further message from CANN" : text;
}

// Events that order the streams of a stage. A wait refers to the record before it, so all stages
// can share them.
aclrtEvent event(c10::DeviceIndex device, size_t index) {
  static thread_local std::array<std::array<aclrtEvent, kEvents>, kMaxDevices> events = {};
  TORCH_CHECK(index < kEvents && device < kMaxDevices, "a stage with more than ", kEvents,
              " hand-overs between streams");
  aclrtEvent& made = events[static_cast<size_t>(device)][index];
  if (made == nullptr) {
    const int status = aclrtCreateEventExWithFlag(&made, ACL_EVENT_SYNC);
    TORCH_CHECK(status == 0, "aclrtCreateEventExWithFlag returned ", status, ": ", recent_error());
  }
  return made;
}

// A runtime function that older CANN releases lack.
void* newer_function(const char* name, const char* need) {
  void* const found = find_symbol_in("libascendcl.so", name);
  TORCH_CHECK(found != nullptr, "libascendcl.so has no ", name, ": ", need);
  return found;
}

void* graph_function(const char* name) {
  return newer_function(name, "captured attention needs a newer CANN. Start with --enforce-eager.");
}

}  // namespace

Stage::Stage(const char* name, const at::Tensor& tensor)
    : name_(name), device_(tensor.device().index()), batch_(std::make_shared<Batch>()) {
  TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1, "vllm_davinci::", name,
              " runs on the NPU and got a tensor on ", tensor.device(), ": move it with .npu()");
  own_ = current_ = c10_npu::getCurrentNPUStream(device_).stream(/*need_empty=*/false);
  batch_->name = name;
  batch_->device = device_;
  batch_->steps.reserve(16);
}

Stage::~Stage() = default;

Stage::Batch::~Batch() {
  // Executors that have not been launched must be destroyed here.
  using Destroy = int (*)(aclOpExecutor*);
  for (size_t step = done; step < steps.size(); ++step) {
    if (steps[step].executor == nullptr) continue;
    static const auto destroy =
        reinterpret_cast<Destroy>(find_symbol_in("libnnopbase.so", "aclDestroyAclOpExecutor"));
    if (destroy != nullptr) destroy(steps[step].executor);
  }
}

void Stage::use_cores_of(void* stream) {
  if (!c10_npu::check_enqueue_need_use(stream)) return;
  constexpr const char* kName = "aclrtUseStreamResInCurrentThread";
  static void* const call =
      newer_function(kName, "limits of cores need a newer CANN. Set none for streams.");
  const int status = reinterpret_cast<int (*)(void*)>(call)(stream);
  TORCH_CHECK(status == 0, kName, " returned ", status, ": ", recent_error());
}

void Stage::refuse(const Operator& op, int status) const {
  TORCH_CHECK(false, "vllm_davinci::", name_, ": ", op.name(), "GetWorkspaceSize returned ", status,
              ": ", recent_error());
}

void Stage::add(Operator& op, uint64_t workspace_bytes, aclOpExecutor* executor) {
  batch_->steps.push_back({Step::Kind::kLaunch, &op, executor, workspace_bytes, current_, nullptr,
                           nullptr, nullptr, nullptr});
}

void Stage::copy(void* destination, const void* source, size_t bytes) {
  batch_->steps.push_back(
      {Step::Kind::kCopy, nullptr, nullptr, bytes, current_, destination, source});
}

void* Stage::handle(const c10::Stream& stream) {
  return c10_npu::NPUStream(stream).stream(/*need_empty=*/false);
}

void Stage::let_wait(void* waiting) {
  void* const shared = event(device_, next_event_++);
  batch_->steps.push_back({Step::Kind::kRecord, nullptr, nullptr, 0, current_, shared, nullptr});
  batch_->steps.push_back({Step::Kind::kWait, nullptr, nullptr, 0, waiting, shared, nullptr});
}

void Stage::use_workspace(const View& workspace) {
  Step& step = batch_->steps.back();
  // torch_npu's workspaces are tensors without elements, whose storage has the requested size.
  const auto bytes =
      static_cast<uint64_t>(workspace.storage_elements) * c10::elementSize(workspace.dtype);
  TORCH_CHECK(step.workspace_bytes <= bytes, "vllm_davinci::", name_, ": ", step.op->name(),
              " needs a workspace of ", step.workspace_bytes, " bytes and is given ", bytes);
  step.workspace = workspace.storage;
}

uint64_t Stage::launch_count() { return launched.load(); }

int Stage::Batch::launch() {
  for (; done < steps.size(); ++done) {
    const Step& step = steps[done];
    int status = 0;
    const char* function = nullptr;
    switch (step.kind) {
      case Step::Kind::kLaunch:
        function = step.op->name();
        launched.fetch_add(1, std::memory_order_relaxed);
        status = reinterpret_cast<Launch>(step.op->launch())(step.workspace, step.workspace_bytes,
                                                             step.executor, step.stream);
        break;
      case Step::Kind::kCopy:
        function = "aclrtMemcpyAsync";
        status = aclrtMemcpyAsync(step.destination, step.workspace_bytes, step.source,
                                  step.workspace_bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, step.stream);
        break;
      case Step::Kind::kGroupBegin: {
        function = "aclmdlRICaptureTaskGrpBegin";
        static void* const call = graph_function(function);
        status = reinterpret_cast<int (*)(void*)>(call)(step.stream);
        break;
      }
      case Step::Kind::kGroupEnd: {
        function = "aclmdlRICaptureTaskGrpEnd";
        static void* const call = graph_function(function);
        status = reinterpret_cast<int (*)(void*, void**)>(call)(step.stream, step.group.get());
        break;
      }
      case Step::Kind::kUpdateBegin: {
        function = "aclmdlRICaptureTaskUpdateBegin";
        static void* const call = graph_function(function);
        status = reinterpret_cast<int (*)(void*, void*)>(call)(step.stream, *step.group);
        break;
      }
      case Step::Kind::kUpdateEnd: {
        function = "aclmdlRICaptureTaskUpdateEnd";
        static void* const call = graph_function(function);
        status = reinterpret_cast<int (*)(void*)>(call)(step.stream);
        break;
      }
      case Step::Kind::kRecord:
        function = "aclrtRecordEvent";
        status = aclrtRecordEvent(step.destination, step.stream);
        break;
      case Step::Kind::kWait:
        function = "aclrtStreamWaitEvent";
        status = aclrtStreamWaitEvent(step.stream, step.destination);
        break;
    }
    if (status != 0) {
      ++done;  // phase two owns the executor now, even if it failed
      TORCH_CHECK(false, "vllm_davinci::", name, ": ", function, " returned ", status, ": ",
                  recent_error());
    }
  }
  return 0;
}

// Operators of one stream run in order, so they share a workspace; those of two streams may overlap
// and use two. torch_npu has one workspace per stream. It cannot grow during a capture, because
// that waits for the device: a capture takes memory of the graph's pool.
std::vector<at::Tensor> Stage::Batch::place_workspaces(bool captures) {
  std::vector<at::Tensor> workspaces;
  for (const Step& first : steps) {
    if (!first.lacks_workspace()) continue;
    void* const stream = first.stream;
    uint64_t bytes = 0;
    for (const Step& step : steps) {
      if (step.lacks_workspace() && step.stream == stream) {
        bytes = std::max(bytes, step.workspace_bytes);
      }
    }
    const c10::Device npu(c10::DeviceType::PrivateUse1, device);
    const c10::DeviceGuard guard(npu);
    if (captures) {
      const auto options = at::TensorOptions().dtype(at::kByte).device(npu);
      workspaces.push_back(at::empty({static_cast<int64_t>(bytes)}, options));
    } else {
      workspaces.push_back(at_npu::native::allocate_workspace(bytes, stream));
    }
    // The address of the storage, because the tensor around it is empty.
    void* const workspace = const_cast<void*>(workspaces.back().storage().data());
    for (Step& step : steps) {
      if (step.lacks_workspace() && step.stream == stream) step.workspace = workspace;
    }
  }
  return workspaces;
}

void Stage::submit() {
  const bool lacks = std::any_of(batch_->steps.begin(), batch_->steps.end(),
                                 [](const Step& step) { return step.lacks_workspace(); });
  // Held until all launches are submitted: in a capture, freed memory could go to the next stream.
  std::vector<at::Tensor> of_graph;
  if (lacks && c10_npu::isStreamCapturingMayInitCtx(own_)) {
    of_graph = batch_->place_workspaces(/*captures=*/true);
  }
  at_npu::native::OpCommand::RunOpApiV2(name_, [batch = batch_] {
    // On the thread that launches: a workspace that grows is freed when the device is idle, but
    // launches that are still in torch_npu's queue would use it.
    batch->place_workspaces(/*captures=*/false);
    return batch->launch();
  });
}

Scratch::Scratch(const at::Tensor& like, std::initializer_list<Piece> pieces) {
  int64_t bytes = 0;
  views_.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    View view = View::over(nullptr, piece.dtype, piece.sizes);
    view.offset = bytes;  // the offset, until memory is allocated
    const int64_t size = view.numel() * static_cast<int64_t>(c10::elementSize(piece.dtype));
    bytes += (size + kTailBytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
    views_.push_back(view);
  }
  // Allocates only memory, because a tensor would take as long again.
  static c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  const c10::DeviceGuard guard(like.device());
  memory_ = allocator->allocate(static_cast<size_t>(bytes));
  auto* const base = static_cast<char*>(memory_.get());
  for (View& view : views_) {
    view.storage = base + view.offset;
    view.offset = 0;
  }
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty(sizes, like.options().dtype(dtype));
}

}  // namespace davinci
