#include "collective/abandoned.h"

#include "collective/deadlock.h"
#include "collective/group.h"
#include "collective/transfers.h"
#include "device/faulty_task.h"
#include "device/graph.h"

namespace vnpu {
namespace {

void leave(const GroupPtr& group, const char* task, const std::string& what) {
  if (group->failed()) return;
  group->set_failure(FailureKind::kRemoteLost,
                     "vnpu: " + group->describe(group->rank()) + " gave up its tasks (" + what +
                         ") and left out " + task + " of group " + group->name() +
                         ". Make the group anew on all its ranks.");
}

void leave_group_of(const Task* launched, const std::string& what) {
  const Task* const task = faults::behind(launched);
  if (const auto* member = dynamic_cast<const GroupTask*>(task)) {
    leave(member->member(), task->name, what);
  } else if (const auto* messages = dynamic_cast<const Transfers*>(task)) {
    leave(messages->group(), task->name, what);
  } else if (const auto* replay = dynamic_cast<const GraphReplay*>(task)) {
    const Graph& graph = replay->graph();
    for (size_t i = 0; i < graph.size(); ++i) leave_group_of(graph.node(i).get(), what);
  }
}

}  // namespace

void leave_groups_of(const std::vector<TaskPtr>& tasks, const std::string& what) {
  for (const TaskPtr& task : tasks) leave_group_of(task.get(), what);
}

}  // namespace vnpu
