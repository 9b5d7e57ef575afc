#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/argument_value.h"

namespace vnpu::ops {

// Calls of an operator that broke none of its rules: a call that recurs in every step of a model is
// compared with them instead of being checked again. Calls are equal where dtypes, formats, sizes,
// strides, numbers and texts are; addresses do not count, so rules must not see them.
class PassedCalls {
 public:
  // positions: of the arguments that count
  explicit PassedCalls(std::vector<int> positions) : positions_(std::move(positions)) {}

  // Bytes of workspace of an equal call; nothing where none is remembered.
  std::optional<uint64_t> find(const ArgumentValue* arguments);
  // Replaces another call if the slot is taken.
  void remember(const ArgumentValue* arguments, uint64_t workspace_bytes);

 private:
  struct Call {
    std::vector<uint64_t> form;
    uint64_t workspace_bytes = 0;
  };
  // More than one step of a model has for one operator, with the lengths of several steps.
  static constexpr int kSlotBits = 5;

  Call& slot_of(const std::vector<uint64_t>& form);

  const std::vector<int> positions_;
  std::mutex mutex_;
  Call calls_[1 << kSlotBits];
};

}  // namespace vnpu::ops
