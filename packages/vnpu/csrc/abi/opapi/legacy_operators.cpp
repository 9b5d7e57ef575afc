// Operators of the older interface (aclop) that torch_npu still uses where CANN has no aclnn one.

#include "abi/opapi/legacy_operator.h"
#include "abi/status.h"
#include "device/system.h"
#include "ops/handles.h"
#include "ops/operator.h"

using namespace vnpu;

namespace vnpu::ops {
Address prepare_Identity();
}

namespace {

// All memory behind a tensor, dense.
aclTensor memory_of(const abi::LegacyTensor& tensor) {
  if (tensor.storage_dims > ops::kMaxDims) {
    throw Failure(FailureKind::kOperatorInvalid,
                  "vnpu: Identity: a tensor of " + std::to_string(tensor.storage_dims) +
                      " dimensions in memory; at most 8 are possible.");
  }
  aclTensor memory;
  ops::TensorView& view = memory.view;
  view.storage = tensor.data;
  view.dtype = ops::read_dtype(tensor.dtype);
  view.dims = static_cast<int8_t>(tensor.storage_dims);
  int64_t step = 1;
  for (size_t i = tensor.storage_dims; i-- > 0;) {
    view.sizes[i] = tensor.storage_sizes[i];
    view.strides[i] = step;
    step *= tensor.storage_sizes[i];
  }
  return memory;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int vnpuRunIdentity(
    const abi::LegacyTensor& source, const abi::LegacyTensor& target, void* stream) {
  return abi::guarded("Identity", [&] {
    using Prepare = int (*)(const aclTensor*, int64_t, const aclTensor*, int64_t,
                            const aclIntArray*, uint64_t*, aclOpExecutor**);
    const auto prepare = reinterpret_cast<Prepare>(ops::prepare_Identity());
    const aclTensor read = memory_of(source);
    const aclTensor written = memory_of(target);
    const aclIntArray sizes{{target.sizes, target.sizes + target.dims}};
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    if (prepare(&read, source.format, &written, target.format, &sizes, &bytes, &executor) != 0) {
      throw Failure(FailureKind::kOperatorInvalid, abi::recent_error());
    }
    const TaskPtr task = executor->task;
    delete executor;
    System::instance().executor().submit(abi::stream_of(stream), task);
  });
}
