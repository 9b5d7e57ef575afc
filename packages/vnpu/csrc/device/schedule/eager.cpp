#include <utility>

#include "device/schedule/schedule.h"

namespace vnpu {
namespace {

using std::chrono::steady_clock;

class EagerSchedule final : public Schedule {
 public:
  explicit EagerSchedule(TaskQueues& queues) : queues_(queues) {}

  void submit(const StreamPtr& stream, TaskPtr task, Lock& lock) override {
    if (!stream->idle()) {
      queues_.enqueue(stream, std::move(task));
      queues_.run_all(lock);
      return;
    }
    bool done = false;
    try {
      done = queues_.run_now(stream, std::move(task), lock);
    } catch (...) {
      queues_.run_all(lock);
      throw;
    }
    if (done) {
      queues_.run_all(lock);
      return;
    }
    queues_.start_background([this](Lock& held) { background_turn(held); });
    if (!queues_.is_driven()) queues_.wake_background();
  }

  bool drive(Lock& lock) override { return queues_.run_all(lock); }
  void rest(steady_clock::time_point until, Lock& lock) override {
    if (!queues_.wait_outside(lock)) queues_.wait_for_progress(until, lock);
  }
  void poll(Lock& lock) override { queues_.run_all(lock); }

 private:
  void background_turn(Lock& lock) {
    if (queues_.pending() == 0 || queues_.is_driven()) {
      queues_.sleep_in_background(lock);
    } else if (!queues_.run_all(lock)) {
      rest(steady_clock::time_point::max(), lock);
    }
  }

  TaskQueues& queues_;
};

}  // namespace

std::unique_ptr<Schedule> make_eager_schedule(TaskQueues& queues) {
  return std::make_unique<EagerSchedule>(queues);
}

}  // namespace vnpu
