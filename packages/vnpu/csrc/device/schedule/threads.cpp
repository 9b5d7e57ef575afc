#include <thread>
#include <utility>

#include "device/schedule/schedule.h"

namespace vnpu {
namespace {

using std::chrono::steady_clock;

class ThreadsSchedule final : public Schedule {
 public:
  explicit ThreadsSchedule(TaskQueues& queues) : queues_(queues) {}

  void on_stream(const StreamPtr& stream) override {
    std::thread(&ThreadsSchedule::work, this, stream).detach();
  }
  void submit(const StreamPtr& stream, TaskPtr task, Lock&) override {
    queues_.enqueue(stream, std::move(task));
    stream->wake.notify_one();
  }
  bool drive(Lock&) override { return false; }
  void rest(steady_clock::time_point until, Lock& lock) override {
    queues_.wait_for_progress(until, lock);
  }
  void poll(Lock&) override {}

 private:
  // One stream's worker.
  void work(const StreamPtr& stream) {
    Lock lock(queues_.mutex);
    while (!stream->destroyed) {
      if (stream->queue.empty()) {
        stream->wake.wait(lock);
        continue;
      }
      queues_.run_head(*stream, lock);
      if (!stream->blocked) continue;
      if (stream->queue.front()->waits_outside()) {
        queues_.wait_inside(*stream, lock);
      } else {
        queues_.wait_for_progress(steady_clock::time_point::max(), lock);
      }
    }
  }

  TaskQueues& queues_;
};

}  // namespace

std::unique_ptr<Schedule> make_threads_schedule(TaskQueues& queues) {
  return std::make_unique<ThreadsSchedule>(queues);
}

}  // namespace vnpu
