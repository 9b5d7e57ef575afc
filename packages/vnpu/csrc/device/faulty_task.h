#pragma once

#include "device/faults.h"
#include "device/task.h"

namespace vnpu::faults {

// Fails at the launch as planned, or replaces the task by one that fails when the device reaches
// it.
void reach_launch_planned(TaskPtr& task);
// The task that a faulty task replaces; of any other task, the task itself.
const Task* behind(const Task* task);
inline void reach_launch(TaskPtr& task) {
  if (!are_possible.load(std::memory_order_relaxed)) [[likely]]
    return;
  reach_launch_planned(task);
}

}  // namespace vnpu::faults
