#include "launch/symbols.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <mutex>
#include <string>

// Exported by libtorch_npu: looks in the libraries of custom operators, then in libopapi.
// Declared in op_plugin/utils/op_api_common_base.h, whose other contents do not compile alone.
void* GetOpApiFuncAddr(const char* name);

namespace davinci {
namespace {

std::string path_of(const char* library) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return std::string(library) + " (not loaded)";
  std::string path = library;
  // The address of a function that every such library has locates the library.
  Dl_info info;
  if (void* known = dlsym(handle, "aclCreateTensor"); known != nullptr && dladdr(known, &info) != 0)
    path = info.dli_fname;
  dlclose(handle);
  return path;
}

std::mutex look_up_mutex;

}  // namespace

void* find_symbol(const char* name) {
  void* const found = GetOpApiFuncAddr(name);
  TORCH_CHECK_NOT_IMPLEMENTED(
      found != nullptr, name, " is neither in ", path_of("libopapi.so"),
      " nor in a library of custom operators. Install the CANN release that torch_npu asks for "
      "(`vllm-davinci doctor` shows both), or uninstall vllm-davinci-kernels: torch_npu's own "
      "operators are used then.");
  return found;
}

void* find_symbol_in(const char* library, const char* name) {
  void* const handle = dlopen(library, RTLD_LAZY);
  return handle == nullptr ? nullptr : dlsym(handle, name);
}

void Operator::look_up() {
  const std::lock_guard<std::mutex> lock(look_up_mutex);
  const std::string prepare_name = std::string(name_) + "GetWorkspaceSize";
  void* const prepare = find_symbol(prepare_name.c_str());
  launch_ = find_symbol(name_);
  prepare_.store(prepare, std::memory_order_release);
}

}  // namespace davinci
