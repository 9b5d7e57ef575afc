// The Python module: importing it registers the operators.

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include "launch/stage.h"
#include "launch/symbols.h"
#include "registration.h"

PYBIND11_MODULE(_C, module) {
  module.attr("torch_version") = TORCH_VERSION;
  module.def("operator_names", &davinci::operator_names, "Names under torch.ops.vllm_davinci.");
  module.def("launches", &davinci::launches, "Operators of CANN that one of ours launches.");
  module.def("launch_count", &davinci::Stage::launch_count,
             "Operators of CANN that ours have launched in this process.");
  module.def(
      "find_symbol",
      [](const std::string& name) {
        try {
          return reinterpret_cast<uintptr_t>(davinci::find_symbol(name.c_str()));
        } catch (const c10::NotImplementedError& error) {
          PyErr_SetString(PyExc_NotImplementedError, error.what_without_backtrace());
          throw pybind11::error_already_set();
        }
      },
      "Address of a function of CANN's operator libraries.");
}
