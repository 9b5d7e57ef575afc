#include "module_triton.h"

#include <pybind11/stl.h>

#include <cstring>
#include <deque>

#include "device/system.h"
#include "interface/status.h"
#include "triton/kernel_task.h"

namespace py = pybind11;

namespace vnpu {
namespace {

using triton::Launch;
using triton::Program;
using triton::Type;

// Loaded kernels stay: tasks, traces and reports name them. Guarded by Python's lock.
std::deque<triton::ProgramPtr>& programs() {
  static auto* const all = new std::deque<triton::ProgramPtr>();
  return *all;
}

// Names of the attributes of a torch tensor that a launch reads.
struct TensorNames {
  py::str data_ptr{"data_ptr"};
  py::str untyped_storage{"untyped_storage"};
  py::str nbytes{"nbytes"};
  static const TensorNames& instance() {
    static const auto* const names = new TensorNames();
    return *names;
  }
};

uint64_t bits_of(Type type, py::handle value) {
  switch (type) {
    case Type::kFloat32: {
      const auto narrow = static_cast<float>(PyFloat_AsDouble(value.ptr()));
      uint32_t bits = 0;
      std::memcpy(&bits, &narrow, sizeof(bits));
      return bits;
    }
    case Type::kFloat64: {
      const double wide = PyFloat_AsDouble(value.ptr());
      uint64_t bits = 0;
      std::memcpy(&bits, &wide, sizeof(bits));
      return bits;
    }
    case Type::kInt1: return PyObject_IsTrue(value.ptr()) != 0;
    case Type::kFloat16:
    case Type::kBfloat16:
    case Type::kFloat8E4m3:
    case Type::kFloat8E5m2:
      throw py::type_error(
          "vnpu: a Triton kernel has a scalar parameter of less than 32 bits that is a float.");
    default: return PyLong_AsUnsignedLongLongMask(value.ptr());
  }
}

void launch_kernel(size_t function, uintptr_t stream_handle, uint32_t x, uint32_t y, uint32_t z,
                   const py::list& arguments) {
  const StreamPtr& stream = abi::stream_of(reinterpret_cast<void*>(stream_handle));
  Launch launch{
      .program = programs().at(function), .grid = {x, y, z}, .arguments = {}, .storages = {}};
  const Program& program = *launch.program;
  if (arguments.size() != program.parameters.size()) {
    throw py::type_error("vnpu: Triton kernel " + program.name + " has " +
                         std::to_string(program.parameters.size()) +
                         " parameters at run time, not " + std::to_string(arguments.size()) + ".");
  }
  if (uint64_t{x} * y * z == 0) return;
  const TensorNames& names = TensorNames::instance();
  std::vector<int64_t> tensor_bytes(arguments.size());
  launch.storages.resize(arguments.size());
  launch.arguments.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const py::handle argument = arguments[i];
    const Type type = program.values[program.parameters[i].value].type;
    if (type != Type::kPointer || PyLong_Check(argument.ptr())) {
      launch.arguments.push_back(bits_of(type, argument));
      if (PyErr_Occurred() != nullptr) throw py::error_already_set();
      continue;
    }
    if (argument.is_none()) {
      launch.arguments.push_back(0);
      continue;
    }
    launch.arguments.push_back(py::cast<uint64_t>(argument.attr(names.data_ptr)()));
    if (!py::hasattr(argument, names.untyped_storage)) continue;
    const py::object storage = argument.attr(names.untyped_storage)();
    const auto begin = py::cast<uintptr_t>(storage.attr(names.data_ptr)());
    const auto bytes = py::cast<uintptr_t>(storage.attr(names.nbytes)());
    if (begin != 0) launch.storages[i] = {begin, begin + bytes};
    if (Task::keeps_work) tensor_bytes[i] = py::cast<int64_t>(argument.attr(names.nbytes));
  }
  auto task = std::make_shared<triton::KernelTask>(std::move(launch), tensor_bytes,
                                                   stream->capture != nullptr);
  const py::gil_scoped_release released;
  System::instance().executor().submit(stream, std::move(task));
}

}  // namespace

void bind_triton(py::module_& m) {
  m.def("triton_operations", [] { return triton::operation_names(); });
  m.def("load_triton_kernel", [](const py::bytes& written) {
    programs().push_back(std::make_shared<Program>(std::string_view(written)));
    return programs().size() - 1;
  });
  m.def("launch_triton_kernel", &launch_kernel);
}

}  // namespace vnpu
