#include "device/task.h"

#include "device/memory_watch.h"

namespace vnpu {

bool Touched::keeps_accesses = false;
bool Task::keeps_work = false;

Progress Task::step() {
  const auto announce = [this] {
    touched.each_written([](const MemoryRange& range) { MemoryWatch::instance().changed(range); });
  };
  try {
    const Progress progress = advance();
    if (progress == Progress::kDone) announce();
    return progress;
  } catch (...) {
    announce();
    throw;
  }
}

}  // namespace vnpu
