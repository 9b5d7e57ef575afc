#include "device/schedule/schedule.h"

#include "device/failure.h"

namespace vnpu {

std::unique_ptr<Schedule> make_schedule(const Configuration& configuration, TaskQueues& queues) {
  switch (configuration.schedule) {
    case SchedulePolicy::kEager: return make_eager_schedule(queues);
    case SchedulePolicy::kThreads: return make_threads_schedule(queues);
    case SchedulePolicy::kFuzz: return make_fuzz_schedule(queues, configuration.seed);
  }
  throw Failure(FailureKind::kInternal, "vnpu: a schedule policy that no class carries out.");
}

}  // namespace vnpu
