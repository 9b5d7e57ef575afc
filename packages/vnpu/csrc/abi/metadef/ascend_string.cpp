// libmetadef: text, as libraries of CANN pass it to each other.

#include "abi/metadef/ascend_string.h"

namespace ge {

AscendString::AscendString(const char* text)
    : name_(text == nullptr ? nullptr : std::make_shared<std::string>(text)) {}

bool AscendString::operator<(const AscendString& other) const {
  if (name_ == nullptr || other.name_ == nullptr) return name_ == nullptr && other.name_ != nullptr;
  return *name_ < *other.name_;
}

}  // namespace ge
