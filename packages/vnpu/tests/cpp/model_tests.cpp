#include "timing/model.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "device/event.h"
#include "device/failure.h"
#include "machine_figures.h"
#include "tasks.h"
#include "timing/machine.h"
#include "timing/work.h"

namespace vnpu::timing {
namespace {

using tests::Changes;
using tests::figures;
using tests::make_executor;

// An operator of the program's, as libopapi makes them.
TaskPtr operation(int64_t bytes) {
  auto task = std::make_shared<tests::Call>([] {}, "aclnnTest");
  task->work = std::make_shared<Work>(Work{.products = {}, .read_bytes = bytes});
  return task;
}

// A separate model that observes the executor. Both live as long as the process.
struct Program {
  explicit Program(const Changes& changes = {})
      : model(*new Model(Machine(figures(changes)), nullptr)),
        executor(make_executor(SchedulePolicy::kEager, 0, observed_by(model))) {}
  static const Observers& observed_by(Model& model) {
    auto* observers = new Observers();
    observers->add(model);
    return *observers;
  }
  Model& model;
  Executor& executor;
};

TEST(TheModel, JoinsTheHostsClockAtSynchronisations) {
  const Program program(Changes{{"host_operator_launch", "10"}, {"host_synchronize", "1"}});
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr stream = executor.create_stream(0, 0);
  executor.submit(stream, operation(100));
  executor.submit(stream, operation(5));
  executor.synchronize(stream, std::nullopt);
  // Launched at 10 and 20; done at 110 and 115; then the call returns.
  const Model::Report report = model.report(0);
  EXPECT_EQ(report.host, 116);
  EXPECT_EQ(report.usage.compute, 105);
}

TEST(TheModel, TakesAReplayAsOneLaunchOfItsNodes) {
  const Program program(
      Changes{{"host_operator_launch", "1000"}, {"host_graph_launch", "7"}, {"graph_node", "2"}});
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr main = executor.create_stream(0, 0);
  const StreamPtr side = executor.create_stream(0, 0);
  const auto fork = std::make_shared<Event>(0);
  const auto join = std::make_shared<Event>(0);
  executor.begin_capture(main);
  executor.submit(main, operation(100));
  executor.record(main, fork);
  executor.wait(side, fork);
  executor.submit(side, operation(50));
  executor.record(side, join);
  executor.submit(main, operation(50));
  executor.wait(main, join);
  const GraphPtr graph = executor.end_capture(main);
  for (int i = 0; i < 2; ++i) {
    executor.submit(main, std::make_shared<GraphReplay>(graph));
    executor.synchronize(main, std::nullopt);
    // 102, then both of 52 share memory: 102 + 2 + 100.
    EXPECT_EQ(model.report(0).host, (i + 1) * (7 + 102 + 2 + 100));
  }
}

TEST(TheModel, RefusesAnOperatorWithoutACost) {
  const Program program;
  Executor& executor = program.executor;
  const StreamPtr stream = executor.create_stream(0, 0);
  try {
    executor.submit(stream, std::make_shared<tests::Call>([] {}, "aclnnUnknown"));
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("aclnnUnknown has no cost"), std::string::npos);
  }
}

TEST(TheModel, MakesTheHostWaitForRoomInAStreamsQueue) {
  const Program program(Changes{{"queue_depth", "2"}});
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr stream = executor.create_stream(0, 0);
  for (int i = 0; i < 3; ++i) executor.submit(stream, operation(100));
  const auto event = std::make_shared<Event>(0);
  executor.record(stream, event);
  EXPECT_EQ(model.report(0).host, 300);
}

}  // namespace
}  // namespace vnpu::timing
