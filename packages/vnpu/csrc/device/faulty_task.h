#pragma once

#include "device/faults.h"
#include "device/task.h"

namespace vnpu::faults {

// Of a launch: fails as the plan says, or replaces the task by one that does when the device comes
// to it.
void reach_launch_planned(TaskPtr& task);
// The task that a plan's stands for; where it is no such, the task itself.
const Task* behind(const Task* task);
inline void reach_launch(TaskPtr& task) {
  if (!are_possible.load(std::memory_order_relaxed)) [[likely]]
    return;
  reach_launch_planned(task);
}

}  // namespace vnpu::faults
