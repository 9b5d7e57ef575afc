#pragma once

// Operators of CANN by name. Nothing is linked: each is looked up when it is first used, in the
// same libraries as torch_npu's operators, so the same build works with a chip's and with vnpu's.

#include <atomic>

namespace davinci {

// The address of an exported function; throws an error that names it and the libraries.
void* find_symbol(const char* name);
// Looks in one library only; null if the library or the function does not exist.
void* find_symbol_in(const char* library, const char* name);

// The two phases of one operator: aclnnXGetWorkspaceSize and aclnnX.
class Operator {
 public:
  constexpr explicit Operator(const char* name) : name_(name) {}  // "aclnnMm"
  const char* name() const { return name_; }
  void* prepare() {
    if (prepare_.load(std::memory_order_acquire) == nullptr) look_up();
    return prepare_.load(std::memory_order_relaxed);
  }
  void* launch() const { return launch_; }  // after prepare()

 private:
  void look_up();
  const char* name_;
  void* launch_ = nullptr;
  std::atomic<void*> prepare_{nullptr};
};

}  // namespace davinci
