#include "device/task.h"

#include "device/memory.h"
#include "device/memory_watch.h"

namespace vnpu {
namespace {

// An operator's arithmetic here does without its workspace, which may have been freed between two
// replays of a graph.
void require_workspace(const Task& task) {
  const Access* const workspace = task.touched.workspace();
  if (workspace == nullptr) return;
  const auto* const begin = reinterpret_cast<const void*>(workspace->begin);
  const size_t bytes = workspace->end - workspace->begin;
  if (Memory::instance().is_live(begin, bytes)) return;
  Memory::instance().check(begin, bytes, (std::string(task.name) + " workspace").c_str());
}

}  // namespace

bool Task::keeps_work = false;

Progress Task::step() {
  const auto announce = [this] {
    touched.each_written([](const MemoryRange& range) { MemoryWatch::instance().changed(range); });
  };
  try {
    require_workspace(*this);
    const Progress progress = advance();
    if (progress == Progress::kDone) announce();
    return progress;
  } catch (...) {
    announce();
    throw;
  }
}

}  // namespace vnpu
