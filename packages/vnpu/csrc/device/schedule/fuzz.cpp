#include <random>
#include <utility>
#include <vector>

#include "device/schedule/schedule.h"

namespace vnpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kIdleHost{20};  // after this time without a host call, work continues

class FuzzSchedule final : public Schedule {
 public:
  FuzzSchedule(TaskQueues& queues, uint64_t seed)
      : queues_(queues), random_(seed), last_host_call_(steady_clock::now()) {}

  void submit(const StreamPtr& stream, TaskPtr task, Lock& lock) override {
    last_host_call_ = steady_clock::now();
    queues_.start_background([this](Lock& held) { background_turn(held); });
    queues_.enqueue(stream, std::move(task));
    queues_.wake_background();
    if (random_() % 8 == 0) run_some(random_() % 4, lock);
  }

  bool drive(Lock& lock) override {
    const bool worked = run_some(1, lock);
    last_host_call_ = steady_clock::now();
    return worked;
  }
  void rest(steady_clock::time_point until, Lock& lock) override {
    if (!queues_.wait_outside(lock)) queues_.wait_for_progress(until, lock);
  }
  void poll(Lock& lock) override { run_some(1 + random_() % 4, lock); }

 private:
  // Runs at most `most` tasks, each of a random stream that has any.
  bool run_some(size_t most, Lock& lock) {
    bool any = false;
    for (size_t n = 0; n < most && queues_.pending() > 0; ++n) {
      if (!run_one(lock)) break;
      any = true;
    }
    return any;
  }

  bool run_one(Lock& lock) {
    std::vector<StreamPtr> candidates;
    for (const StreamPtr& stream : queues_.streams()) {
      if (!stream->queue.empty() && !stream->running) candidates.push_back(stream);
    }
    while (!candidates.empty()) {
      const size_t pick = random_() % candidates.size();
      const StreamPtr stream = candidates[pick];
      candidates.erase(candidates.begin() + static_cast<ptrdiff_t>(pick));
      if (stream->queue.empty() || stream->running) continue;
      queues_.run_head(*stream, lock);
      if (!stream->blocked) return true;
    }
    return false;
  }

  // The order stays the seed's as long as the host keeps calling.
  void background_turn(Lock& lock) {
    if (queues_.pending() == 0) {
      queues_.sleep_in_background(lock);
    } else if (queues_.is_driven() || steady_clock::now() - last_host_call_ < kIdleHost) {
      queues_.sleep_in_background(lock, kIdleHost);
    } else if (!run_some(1, lock)) {
      rest(steady_clock::time_point::max(), lock);
    }
  }

  TaskQueues& queues_;
  std::mt19937_64 random_;
  steady_clock::time_point last_host_call_;
};

}  // namespace

std::unique_ptr<Schedule> make_fuzz_schedule(TaskQueues& queues, uint64_t seed) {
  return std::make_unique<FuzzSchedule>(queues, seed);
}

}  // namespace vnpu
