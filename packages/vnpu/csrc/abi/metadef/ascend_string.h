#pragma once

#include <memory>
#include <string>

namespace ge {

// Text that libraries of CANN pass to each other. Programs compile its copies themselves, so its
// one member is CANN's. Source: gitcode.com/cann/metadef inc/external/graph/ascend_string.h.
class __attribute__((visibility("default"))) AscendString {
 public:
  AscendString() = default;
  AscendString(const char* text);  // not explicit: options are written as literals

  bool operator<(const AscendString& other) const;

  // Not one of CANN's, whose programs compile their own.
  __attribute__((visibility("hidden"))) std::string text() const {
    return name_ == nullptr ? std::string() : *name_;
  }

 private:
  std::shared_ptr<std::string> name_;
};

}  // namespace ge
