#pragma once

// A launch of a Triton kernel as a task of a stream.

#include <optional>
#include <vector>

#include "device/task.h"
#include "triton/machine.h"

namespace vnpu::triton {

class KernelTask final : public Task {
 public:
  // tensor_bytes: of each argument that is a tensor, its elements' bytes; else 0
  // is_captured: the launch is kept for a graph. It then states the whole tensors that it may use.
  KernelTask(Launch launch, const std::vector<int64_t>& tensor_bytes, bool is_captured);

 protected:
  Progress advance() override;

 private:
  // Tells the observers, and finds conflicts of programs.
  void tell(const AccessLog& log, bool has_failed);

  const Launch launch_;
};

// Work of a kernel, for the timing model.
timing::Work work_of(const Launch& launch, const std::vector<int64_t>& tensor_bytes);

}  // namespace vnpu::triton
