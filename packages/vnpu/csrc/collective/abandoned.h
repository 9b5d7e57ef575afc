#pragma once

#include <string>
#include <vector>

#include "device/task.h"

namespace vnpu {

// Tells the groups of collectives and messages among tasks that were given up, graphs' nodes
// included, that this rank has left them out: its next collective would meet another of its
// fellows. `what`: the call that gave them up.
void leave_groups_of(const std::vector<TaskPtr>& tasks, const std::string& what);

}  // namespace vnpu
