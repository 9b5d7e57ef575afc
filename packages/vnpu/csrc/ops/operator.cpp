#include "ops/operator.h"

#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>

#include "device/configuration.h"
#include "device/core_limits.h"
#include "device/memory.h"
#include "device/system.h"
#include "interface/status.h"
#include "ops/handles.h"
#include "ops/refusal_log.h"
#include "timing/work.h"

namespace vnpu::ops {
namespace {

thread_local const char* running_operator = "aclnn";

// Bytes of an operand's elements, not of its broadcast: repeated elements are read once.
int64_t bytes_of(const Access& access) {
  if (access.layout.dims == 0) return static_cast<int64_t>(access.end - access.begin);
  int64_t bytes = access.layout.item;
  for (int i = 0; i < access.layout.dims; ++i) {
    if (access.layout.strides[i] != 0) bytes *= access.layout.sizes[i];
  }
  return bytes;
}

// A workspace is ordinary memory: it must be allocated, and no other launch may use it meanwhile.
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

// Memory for an object followed by more data, in one allocation.
template <class T>
struct WithRoom {
  using value_type = T;
  explicit WithRoom(size_t room) : room(room) {}
  template <class U>
  WithRoom(const WithRoom<U>& other) : room(other.room) {}
  T* allocate(size_t count) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    return static_cast<T*>(::operator new(count * sizeof(T) + room));
  }
  void deallocate(T* place, size_t) { ::operator delete(place); }
  template <class U>
  bool operator==(const WithRoom<U>& other) const {
    return room == other.room;
  }
  size_t room;
};

// A call of any operator; its arguments follow in memory, in order and in the form of their types.
class alignas(16) CallTask final : public OperatorTask {
 public:
  CallTask(const Operator& op, const Parameters& parameters, const void* const* arguments)
      : OperatorTask(op.name), op_(op), parameters_(parameters) {
    Launch launch{op.name};
    std::byte* place = first();
    try {
      for (; num_kept_ < parameters.count; ++num_kept_) {
        const ArgumentType& type = *parameters.types[num_kept_];
        type.keep(place, arguments[num_kept_], launch.next());
        place += type.bytes;
      }
      touched = std::move(launch.touched);
      if (keeps_work) {
        with_values([&](const ArgumentValue* values) { work = work_of(op, values, touched); });
      }
    } catch (...) {
      destroy_kept();
      throw;
    }
  }
  ~CallTask() override { destroy_kept(); }

  uint64_t check_against_rules() {
    const Constraints* const constraints = op_.constraints();
    if (constraints == nullptr) return check(op_, nullptr, nullptr);
    uint64_t needed = 0;
    with_values([&](const ArgumentValue* values) { needed = check(op_, constraints, values); });
    return needed;
  }

 private:
  std::byte* first() { return reinterpret_cast<std::byte*>(this) + sizeof(CallTask); }

  // Passes rules and costs their view of the call: the arguments, and an additional absent one.
  template <class Use>
  void with_values(Use use) {
    constexpr size_t kNear = 24;  // most operators have fewer arguments
    ArgumentValue near[kNear];
    std::vector<ArgumentValue> far;
    ArgumentValue* values = near;
    if (parameters_.count >= kNear) {
      far.resize(parameters_.count + 1);
      values = far.data();
    }
    const std::byte* place = first();
    for (size_t i = 0; i < parameters_.count; ++i) {
      values[i] = parameters_.types[i]->value(place);
      place += parameters_.types[i]->bytes;
    }
    use(values);
  }

  void destroy_kept() {
    std::byte* place = first();
    for (size_t i = 0; i < num_kept_; ++i) {
      const ArgumentType& type = *parameters_.types[i];
      if (type.destroy != nullptr) type.destroy(place);
      place += type.bytes;
    }
  }

  void run() override {
    Tensors tensors;
    parameters_.run(KeptArguments(first(), tensors));
  }

  const Operator& op_;
  const Parameters& parameters_;
  size_t num_kept_ = 0;
};

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

std::vector<int64_t> read_ints(const aclIntArray* array) { return array->values; }
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

int launch(void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor, void* stream) {
  if (executor == nullptr) {
    return abi::report(FailureKind::kOperatorInvalid,
                       "vnpu: an operator was launched without an executor.");
  }
  const TaskPtr task = executor->task;
  const uint64_t needed = executor->workspace_bytes;
  delete executor;
  try {
    add_workspace(*task, workspace, workspace_bytes, needed);
  } catch (...) {
    return report_exception(task->name);
  }
  return abi::guarded(task->name, [&] {
    System& system = System::instance();
    system.executor().submit(abi::stream_of(stream), task);
  });
}

#define VNPU_COMPILED(T) template struct KeptArgument<T>;
VNPU_ARGUMENT_TYPES(VNPU_COMPILED)
#undef VNPU_COMPILED

int prepare_call(const Operator& op, const Parameters& parameters, const void* const* arguments,
                 uint64_t* workspace_bytes, aclOpExecutor** executor) {
  try {
    size_t room = 0;
    for (size_t i = 0; i < parameters.count; ++i) room += parameters.types[i]->bytes;
    auto task = std::allocate_shared<CallTask>(WithRoom<CallTask>(room), op, parameters, arguments);
    const uint64_t needed = task->check_against_rules();
    finish_prepare(std::move(task), needed, workspace_bytes, executor);
    return 0;
  } catch (...) {
    return report_exception(op.name);
  }
}

std::shared_ptr<const timing::Work> work_of(const Operator& op, const ArgumentValue* values,
                                            const Touched& touched) {
  if (op.declared().cost == nullptr) return nullptr;
  auto work = std::make_shared<timing::Work>();
  for (const Access& access : touched.accesses()) {
    (access.write ? work->written_bytes : work->read_bytes) += bytes_of(access);
  }
  op.declared().cost(Call(values, op.names()), *work);
  return work;
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
