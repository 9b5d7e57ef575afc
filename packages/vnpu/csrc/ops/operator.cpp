#include "ops/operator.h"

#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>

#include "abi/status.h"
#include "device/configuration.h"
#include "device/memory.h"
#include "ops/handles.h"
#include "ops/refusal_log.h"

namespace vnpu::ops {
namespace {

thread_local const char* running_operator = "aclnn";

}  // namespace

// --- for bodies --------------------------------------------------------------------------------

void store(const Tensor& out, const Tensor& result) {
  if (out.sizes() == result.sizes()) {
    out.copy_(result);
    return;
  }
  if (out.numel() == result.numel() && out.numel() == 1) {
    out.copy_(result.reshape(out.sizes()));
    return;
  }
  out.copy_(result.expand(out.sizes()));
}

void refuse(const std::string& message) {
  throw Failure(FailureKind::kOperatorInvalid, std::string(running_operator) + ": " + message);
}

Tensor widen(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

Tensor number(const Scalar& scalar) { return at::native::wrapped_scalar_tensor(scalar); }

void DynamicOut::set(const Tensor& result) const {
  const Tensor dense = result.to(tensor.scalar_type()).contiguous();
  require(dense.numel() <= tensor.numel(), "the result does not fit into the memory given for it");
  if (dense.numel() > 0)
    std::memcpy(tensor.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
  TensorView& view = handle->view;
  view.dims = static_cast<int8_t>(dense.dim());
  for (int64_t i = 0; i < dense.dim(); ++i) {
    view.sizes[i] = dense.size(i);
    view.strides[i] = dense.stride(i);
  }
}

// --- machinery -----------------------------------------------------------------------------------

TensorView Launch::view(const aclTensor* tensor, bool write, bool read) {
  const TensorView& view = tensor->view;
  const auto [begin, end] = view.extent();
  if (begin != end) {
    if (!Memory::instance().is_live(reinterpret_cast<const void*>(begin), end - begin)) {
      const std::string what = std::string(name) + " argument " + std::to_string(position);
      Memory::instance().check(reinterpret_cast<const void*>(begin), end - begin, what.c_str());
    }
    if (Touched::keeps_accesses) {
      const Access::Layout layout = view.layout(begin);
      if (read) touched.add({begin, end, false, layout});
      if (write) touched.add({begin, end, true, layout});
    } else if (write) {
      touched.add_written({begin, end});
    }
  }
  return view;
}

std::vector<TensorView> Launch::views(const aclTensorList* list, bool write, bool read) {
  std::vector<TensorView> all;
  all.reserve(list->tensors.size());
  for (const aclTensor* tensor : list->tensors) {
    if (tensor == nullptr) missing();
    all.push_back(view(tensor, write, read));
  }
  return all;
}

void Launch::missing() const {
  throw Failure(
      FailureKind::kOperatorInvalid,
      std::string(name) + ": argument " + std::to_string(position) + " is null but required.");
}

Tensor Tensors::make(const TensorView& view) {
  for (const auto& [storage, tensor] : made_) {
    if (storage == view.storage) return as_tensor(view, &tensor);
  }
  Tensor tensor = as_tensor(view);
  made_.emplace_back(view.storage, tensor);
  return tensor;
}

TypedScalar read_scalar(const aclScalar* scalar) { return scalar->scalar; }

std::vector<Scalar> read_scalars(const aclScalarList* list) {
  std::vector<Scalar> values;
  for (const aclScalar* scalar : list->scalars) values.push_back(scalar->scalar.value);
  return values;
}

std::vector<int64_t> read_ints(const aclIntArray* array) { return array->values; }
std::vector<float> read_floats(const aclFloatArray* array) { return array->values; }
BoolArray read_bools(const aclBoolArray* array) { return array->values; }

ScalarType read_dtype(int32_t acl_data_type) {
  switch (acl_data_type) {  // aclDataType in acl_base_rt.h
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 7: return at::kUInt16;
    case 8: return at::kUInt32;
    case 9: return at::kLong;
    case 10: return at::kUInt64;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
    default:
      throw Failure(FailureKind::kOperatorInvalid,
                    "vnpu: aclDataType " + std::to_string(acl_data_type) +
                        " has no arithmetic here. Known: float, float16, bfloat16, double, int8, "
                        "int16, int32, int64, uint8, uint16, uint32, uint64, bool, complex64, "
                        "complex128.");
  }
}

Progress OperatorTask::advance() {
  if (!Configuration::instance().compute) return Progress::kDone;
  const char* const outer = running_operator;
  running_operator = name;
  // ATen runs on plain CPU tensors below autograd, whatever the launching thread has switched on.
  const c10::InferenceMode guard;
  try {
    run();
  } catch (const Failure&) {
    running_operator = outer;
    throw;
  } catch (const c10::Error& e) {
    running_operator = outer;
    throw Failure(FailureKind::kOperatorFailed,
                  std::string(name) + ": " + e.what_without_backtrace());
  } catch (const std::exception& e) {
    running_operator = outer;
    throw Failure(FailureKind::kOperatorFailed, std::string(name) + ": " + e.what());
  }
  running_operator = outer;
  return Progress::kDone;
}

void finish_prepare(TaskPtr task, uint64_t needed, uint64_t* workspace_bytes,
                    aclOpExecutor** executor) {
  task->cores = core_limits::of_launch();
  *workspace_bytes = needed;
  *executor = new aclOpExecutor{std::move(task), needed};
}

int report_exception(const char* name) {
  if (RefusalLog* const log = RefusalLog::instance()) {
    try {
      throw;
    } catch (const Failure& failure) {
      const FailureKind kind = failure.kind;
      if (kind == FailureKind::kOperatorInvalid || kind == FailureKind::kTilingRefused) {
        log->add_refusal(failure.what());
      }
    } catch (...) {  // no refusal, and reported below
    }
  }
  return abi::report_exception(name);
}

}  // namespace vnpu::ops
