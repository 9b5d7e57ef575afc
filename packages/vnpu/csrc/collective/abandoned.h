#pragma once

#include <string>
#include <vector>

#include "device/task.h"

namespace vnpu {

// Tells the groups of collectives and messages among aborted tasks, graphs' nodes included, that
// this rank has skipped them: otherwise its next collective would match an earlier one of the other
// ranks. `what`: the call that aborted them.
void leave_groups_of(const std::vector<TaskPtr>& tasks, const std::string& what);

}  // namespace vnpu
