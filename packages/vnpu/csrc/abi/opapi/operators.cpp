// libopapi: the operators, each in two phases, and what torch_npu asks for beside them.
//
// The symbols are indirect functions: the loader asks a resolver for the address, which lets the C
// signature of a first phase follow from its row in ops/ instead of being written a second time.

#include <algorithm>

#include "abi/status.h"
#include "device/memory.h"
#include "device/system.h"
#include "ops/constraints.h"
#include "ops/handles.h"
#include "ops/matmul/fractal_layout.h"
#include "ops/operator.h"

using namespace vnpu;

namespace {

// A workspace is memory like any other: it has to be there, and nobody else may use it meanwhile.
void add_workspace(Task& task, const void* workspace, uint64_t given, uint64_t needed) {
  if (needed == 0) return;
  if (workspace == nullptr || given < needed) {
    throw Failure(FailureKind::kOperatorInvalid,
                  std::string(task.name) + ": a workspace of " + std::to_string(given) +
                      " bytes at " + (workspace == nullptr ? "null" : "an address") + ", but " +
                      std::to_string(needed) + " were asked for by " + task.name +
                      "GetWorkspaceSize. Pass what it asked for.");
  }
  Memory& memory = Memory::instance();
  if (!memory.is_live(workspace, needed)) {
    memory.check(workspace, needed, (std::string(task.name) + " workspace").c_str());
  }
  const auto begin = reinterpret_cast<uintptr_t>(workspace);
  task.touched.set_workspace({begin, begin + needed});
}

// Phase two of every operator.
int launch(void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor, void* stream) {
  if (executor == nullptr) {
    return abi::report(FailureKind::kOperatorInvalid,
                       "vnpu: an operator was launched without an executor.");
  }
  // One-shot executors end here; a repeatable one belongs to the caller.
  const TaskPtr task = executor->task;
  const uint64_t needed = executor->workspace_bytes;
  if (!executor->repeatable) delete executor;
  try {
    add_workspace(*task, workspace, workspace_bytes, needed);
  } catch (...) {
    return ops::report_exception(task->name);
  }
  return abi::guarded(task->name, [&] {
    System& system = System::instance();
    system.executor().submit(abi::stream_of(stream), task);
  });
}

}  // namespace

#define VNPU_INDIRECT(SYMBOL, ADDRESS)                                             \
  extern "C" {                                                                     \
  __attribute__((used)) static ops::Address resolve_##SYMBOL() { return ADDRESS; } \
  __attribute__((visibility("default"), ifunc("resolve_" #SYMBOL))) void SYMBOL(); \
  }
#define VNPU_EXPORT(NAME)                                             \
  namespace vnpu::ops {                                               \
  Address prepare_##NAME();                                           \
  }                                                                   \
  VNPU_INDIRECT(aclnn##NAME##GetWorkspaceSize, ops::prepare_##NAME()) \
  VNPU_INDIRECT(aclnn##NAME, reinterpret_cast<ops::Address>(&launch))
#define VNPU_MAX_WORKSPACE(NAME) \
  VNPU_INDIRECT(aclnn##NAME##GetMaxWorkspaceSize, ops::prepare_##NAME())

#include "abi/opapi/operators.inc"

// Not in two phases: says what the caller has to allocate. The caller frees the sizes with
// delete[].
extern "C" __attribute__((visibility("default"))) int aclnnNpuFormatCastCalculateSizeAndFormat(
    const aclTensor* source, int format, int additional_type, int64_t** sizes, uint64_t* dims,
    int* actual_format) {
  try {
    const ops::TensorView& view = source->view;
    std::vector<int64_t> result(view.sizes, view.sizes + view.dims);
    if (format == ops::kFormatFractalNz) {
      const size_t item = at::elementSize(ops::read_dtype(additional_type));
      result = ops::fractal_sizes(result, 32 / static_cast<int64_t>(item));
    } else if (format != ops::kFormatNd) {
      throw Failure(FailureKind::kOperatorInvalid,
                    "aclnnNpuFormatCastCalculateSizeAndFormat: format " + std::to_string(format) +
                        " is not known; ND (2) and FRACTAL_NZ (29) are.");
    }
    *sizes = new int64_t[result.size()];
    std::copy(result.begin(), result.end(), *sizes);
    *dims = result.size();
    *actual_format = format;
    return 0;
  } catch (...) {
    return abi::report_exception("aclnnNpuFormatCastCalculateSizeAndFormat");
  }
}

// Likewise: the elements of a weight [batch.., n, k] in FRACTAL_NZ, with tiles of 32 columns unless
// its numbers have 16 bits.
extern "C" __attribute__((visibility("default"))) int aclnnCalculateMatmulWeightSizeV2(
    const aclIntArray* sizes, int type, uint64_t* elements) {
  constexpr const char* kName = "aclnnCalculateMatmulWeightSizeV2";
  constexpr int kHalf = 1;
  constexpr int kBFloat16 = 27;  // aclDataType
  try {
    if (sizes == nullptr || elements == nullptr) {
      throw Failure(FailureKind::kOperatorInvalid, std::string(kName) + ": a null pointer.");
    }
    const std::vector<int64_t>& shape = sizes->values;
    if (shape.size() < 2 || shape.size() > 6 ||
        std::find(shape.begin(), shape.end(), 0) != shape.end()) {
      throw Failure(FailureKind::kOperatorInvalid,
                    std::string(kName) + ": a weight has 2 to 6 dimensions, none of them empty.");
    }
    *elements = 1;
    for (const int64_t size :
         ops::fractal_sizes(shape, type == kHalf || type == kBFloat16 ? 16 : 32))
      *elements *= static_cast<uint64_t>(size);
    return 0;
  } catch (...) {
    return abi::report_exception(kName);
  }
}

// Not CANN's: the rows of ops/constraints.h, for tests and documents. The text lives as long as the
// process.
extern "C" __attribute__((visibility("default"))) const char* vnpuListConstraints() {
  static const std::string all = ops::listed_constraints();
  return all.c_str();
}
