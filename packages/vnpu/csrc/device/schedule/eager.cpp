#include <algorithm>
#include <utility>

#include "device/schedule/schedule.h"

namespace vnpu {
namespace {

using std::chrono::steady_clock;

class EagerSchedule final : public Schedule {
 public:
  explicit EagerSchedule(TaskQueues& queues) : queues_(queues) {}

  void submit(const StreamPtr& stream, TaskPtr task, Lock& lock) override {
    if (task->is_long() || !stream->idle()) {
      queues_.enqueue(stream, std::move(task));
      queues_.run_short(lock);
      if (any_long()) hand_over();
      return;
    }
    bool done = false;
    try {
      done = queues_.run_now(stream, std::move(task), lock);
    } catch (...) {
      queues_.run_short(lock);
      throw;
    }
    if (done) {
      queues_.run_short(lock);
      return;
    }
    hand_over();
  }

  bool drive(Lock& lock) override { return queues_.run_all(lock); }
  void rest(steady_clock::time_point until, Lock& lock) override {
    if (!queues_.wait_outside(lock)) queues_.wait_for_progress(until, lock);
  }
  void poll(Lock& lock) override { queues_.run_short(lock); }

 private:
  // True if a stream's next task is long and no thread runs it.
  bool any_long() const {
    return std::ranges::any_of(queues_.streams(), [](const StreamPtr& stream) {
      return !stream->queue.empty() && !stream->running && stream->queue.front()->is_long();
    });
  }
  // True if the background thread has to run tasks: a waiting host thread may also run them, but it
  // checks for new ones only occasionally.
  bool is_needed() const { return queues_.pending() > 0 && (!queues_.is_driven() || any_long()); }

  void hand_over() {
    queues_.start_background([this](Lock& held) { background_turn(held); });
    if (is_needed()) queues_.wake_background();
  }

  void background_turn(Lock& lock) {
    if (!is_needed()) {
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
