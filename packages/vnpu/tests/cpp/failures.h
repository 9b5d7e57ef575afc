#pragma once

// Kind of failure of a call, for tests.

#include <functional>
#include <string>

#include "device/failure.h"

namespace vnpu::tests {

inline std::string message_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}

}  // namespace vnpu::tests
