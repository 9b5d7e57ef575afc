#include "device/task.h"

namespace vnpu {

bool Task::collects_accesses = false;

}  // namespace vnpu
