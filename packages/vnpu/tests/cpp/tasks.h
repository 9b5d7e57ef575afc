#pragma once

// Tasks and executors for tests.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "device/executor.h"

namespace vnpu::tests {

// Runs a function once.
class Call final : public Task {
 public:
  explicit Call(std::function<void()> function, const char* name = "call")
      : Task(name), function_(std::move(function)) {}
  Progress advance() override {
    function_();
    return Progress::kDone;
  }

 private:
  std::function<void()> function_;
};

// Blocks until it is opened.
class Gate final : public Task {
 public:
  Gate() : Task("gate") {}
  Progress advance() override { return open ? Progress::kDone : Progress::kBlocked; }
  bool waits_outside() const override { return true; }
  std::string waiting_for() const override { return "the test"; }

  std::atomic<bool> open{false};
};

// Uses memory: [begin, begin + bytes), every byte or `layout`.
inline TaskPtr use(const void* begin, size_t bytes, bool write, const char* name = "use",
                   Access::Layout layout = {}) {
  auto task = std::make_shared<Call>([] {}, name);
  const auto first = reinterpret_cast<uintptr_t>(begin);
  Touched::keeps_accesses = true;  // even if the observer is added later
  task->touched.add({first, first + bytes, write, layout});
  return task;
}

inline TaskPtr call(std::function<void()> function) {
  return std::make_shared<Call>(std::move(function));
}

// A long task, such as a graph's replay.
inline TaskPtr long_call(std::function<void()> function) {
  class Long final : public Task {
   public:
    explicit Long(std::function<void()> function) : Task("long"), function_(std::move(function)) {}
    Progress advance() override {
      function_();
      return Progress::kDone;
    }
    bool is_long() const override { return true; }

   private:
    std::function<void()> function_;
  };
  return std::make_shared<Long>(std::move(function));
}

// Waits some seconds for a flag; returns its value.
inline bool becomes_true(const std::atomic<bool>& flag) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!flag && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return flag;
}

inline TaskPtr failing(const std::string& message) {
  return call([message] { throw Failure(FailureKind::kOperatorFailed, message); });
}

// An executor lives as long as the process, as its threads do.
inline Executor& make_executor(SchedulePolicy schedule, uint64_t seed = 0,
                               const Observers& observers = *new Observers(),
                               double wait_limit_seconds = 20) {
  Configuration configuration;
  configuration.schedule = schedule;
  configuration.seed = seed;
  configuration.wait_limit_seconds = wait_limit_seconds;
  return *new Executor(configuration, observers);
}

}  // namespace vnpu::tests
