#include "device/call_site.h"

#include <dlfcn.h>

#include <cstdint>
#include <string_view>

namespace vnpu {
namespace {

// The few functions of CPython's stable interface that are needed, found in the process: the device
// library does not link Python.
struct Python {
  using Object = void;
  int (*is_initialized)() = nullptr;
  void* (*own_thread_state)() = nullptr;
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  Object* (*get_frame)() = nullptr;
  Object* (*frame_back)(Object*) = nullptr;
  Object* (*frame_code)(Object*) = nullptr;
  int (*frame_line)(Object*) = nullptr;
  Object* (*attribute)(Object*, const char*) = nullptr;
  const char* (*utf8)(Object*) = nullptr;
  void (*decref)(Object*) = nullptr;

  Python() {
    find(is_initialized, "Py_IsInitialized");
    find(own_thread_state, "PyGILState_GetThisThreadState");
    find(ensure, "PyGILState_Ensure");
    find(release, "PyGILState_Release");
    find(get_frame, "PyEval_GetFrame");
    find(frame_back, "PyFrame_GetBack");
    find(frame_code, "PyFrame_GetCode");
    find(frame_line, "PyFrame_GetLineNumber");
    find(attribute, "PyObject_GetAttrString");
    find(utf8, "PyUnicode_AsUTF8");
    find(decref, "Py_DecRef");
  }
  static const Python& instance() {
    static const Python python;
    return python;
  }
  bool runs() const { return complete_ && is_initialized() != 0; }
  bool knows_this_thread() const { return own_thread_state() != nullptr; }

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
    complete_ = complete_ && function != nullptr;
  }
  bool complete_ = true;
};

constexpr int kFrames = 3;

bool belongs_to_torch(std::string_view file) {
  return file.find("/torch/") != std::string_view::npos ||
         file.find("/torch_npu/") != std::string_view::npos ||
         file.find("/triton/runtime/") != std::string_view::npos ||
         file.find("/vnpu/triton_backend/") != std::string_view::npos;
}

}  // namespace

std::string python_call_site() {
  const Python& python = Python::instance();
  // A thread that Python does not know has no frames, and must not wait for the interpreter.
  if (!python.runs() || !python.knows_this_thread()) return {};
  const int state = python.ensure();
  std::string text;
  int kept = 0;
  void* frame = python.get_frame();  // borrowed; the ones below are owned
  bool owned = false;
  while (frame != nullptr && kept < kFrames) {
    void* code = python.frame_code(frame);
    void* file = python.attribute(code, "co_filename");
    void* function = python.attribute(code, "co_name");
    const char* file_text = file != nullptr ? python.utf8(file) : nullptr;
    const char* function_text = function != nullptr ? python.utf8(function) : nullptr;
    if (file_text != nullptr && function_text != nullptr && !belongs_to_torch(file_text)) {
      text += std::string("\n      ") + file_text + ":" + std::to_string(python.frame_line(frame)) +
              " in " + function_text;
      ++kept;
    }
    if (file != nullptr) python.decref(file);
    if (function != nullptr) python.decref(function);
    python.decref(code);
    void* back = python.frame_back(frame);
    if (owned) python.decref(frame);
    frame = back;
    owned = true;
  }
  if (owned && frame != nullptr) python.decref(frame);
  python.release(state);
  return text;
}

bool is_program_thread() {
  const Python& python = Python::instance();
  return !python.runs() || python.knows_this_thread();
}

}  // namespace vnpu
