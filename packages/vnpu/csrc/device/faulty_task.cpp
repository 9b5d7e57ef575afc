#include "device/faulty_task.h"

#include <atomic>
#include <utility>

namespace vnpu::faults {
namespace {

// A task that executes a fault action before its work; only once, even if a graph replays it.
class FaultyTask final : public Task {
 public:
  FaultyTask(TaskPtr task, PlannedLaunch planned)
      : Task(task->name),
        task_(std::move(task)),
        action_(planned.action),
        text_(std::move(planned.text)) {
    touched = task_->touched;
    work = task_->work;
    cores = task_->cores;
  }
  void wait(std::chrono::microseconds limit) override {
    is_done_ ? task_->wait(limit) : Task::wait(limit);
  }
  bool waits_outside() const override { return is_done_ ? task_->waits_outside() : true; }
  bool is_long() const override { return task_->is_long(); }
  std::string waiting_for() const override { return is_done_ ? task_->waiting_for() : text_; }
  void rewind() override { task_->rewind(); }
  const Task* behind() const { return task_.get(); }

 protected:
  Progress advance() override {
    if (is_done_) return task_->step();
    if (action_.what == Action::What::kHang) return Progress::kBlocked;
    // The launch must succeed, even under a policy that runs the task during its launch.
    if (!std::exchange(was_launched_, true)) return Progress::kBlocked;
    is_done_ = true;
    perform(action_, Kind::kLaunch, text_);
    return task_->step();
  }

 private:
  const TaskPtr task_;
  const Action action_;
  const std::string text_;
  bool was_launched_ = false;
  std::atomic<bool> is_done_{false};
};

}  // namespace

const Task* behind(const Task* task) {
  const auto* const faulty = dynamic_cast<const FaultyTask*>(task);
  return faulty == nullptr ? task : faulty->behind();
}

void reach_launch_planned(TaskPtr& task) {
  std::optional<PlannedLaunch> planned = next_launch(task->name);
  if (!planned.has_value()) return;
  if (!planned->action.is_async) {
    perform(planned->action, Kind::kLaunch, planned->text);
    return;
  }
  task = std::make_shared<FaultyTask>(std::move(task), std::move(*planned));
}

}  // namespace vnpu::faults
