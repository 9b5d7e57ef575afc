#include "device/executor.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "schedules.h"
#include "tasks.h"

namespace vnpu {
namespace {

using tests::call;
using tests::failing;
using tests::Gate;
using tests::make_executor;
using tests::Schedules;

using std::chrono::milliseconds;

INSTANTIATE_TEST_SUITE_P(All, Schedules, ::testing::ValuesIn(tests::kPolicies),
                         tests::name_of_policy);

TEST_P(Schedules, AStreamRunsItsTasksInOrder) {
  std::vector<int> ran;
  for (int i = 0; i < 100; ++i) {
    executor.submit(a, call([&ran, i] { ran.push_back(i); }));
  }
  executor.synchronize(a, std::nullopt);
  std::vector<int> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(ran, expected);
  EXPECT_TRUE(executor.query(a));
}

TEST_P(Schedules, AnEventOrdersTwoStreams) {
  for (int i = 0; i < 20; ++i) {
    const auto event = std::make_shared<Event>(0);
    int value = 0;
    int seen = 0;
    executor.submit(a, call([&] { value = 1; }));
    executor.record(a, event);
    executor.wait(b, event);
    executor.submit(b, call([&] { seen = value; }));
    executor.synchronize(b, std::nullopt);
    EXPECT_EQ(seen, 1);
  }
}

TEST_P(Schedules, AWaitIsForTheRecordBeforeIt) {
  const auto event = std::make_shared<Event>(0);
  const auto gate = std::make_shared<Gate>();
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(a, gate);
  executor.record(a, event);  // newer than the wait
  executor.synchronize(b, std::nullopt);
  EXPECT_FALSE(executor.query(event));
  gate->open = true;
  executor.synchronize(event, std::nullopt);
  EXPECT_TRUE(executor.query(event));
}

TEST_P(Schedules, AWaitThatEndsTooLateNamesWhatItWaitedFor) {
  const auto gate = std::make_shared<Gate>();
  executor.submit(a, gate);
  executor.submit(a, call([] {}));
  try {
    executor.synchronize(a, milliseconds(30));
    FAIL() << "the wait ended";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.kind, FailureKind::kWaitTimeout);
    const std::string text = failure.what();
    EXPECT_NE(text.find("waited 30 ms for a stream"), std::string::npos) << text;
    EXPECT_NE(text.find("2 tasks, the first (gate) waits for the test"), std::string::npos) << text;
  }
  gate->open = true;
  executor.synchronize(a, std::nullopt);
}

TEST_P(Schedules, ABlockedStreamDoesNotHoldUpAnother) {
  const auto gate = std::make_shared<Gate>();
  executor.submit(a, gate);
  bool ran = false;
  executor.submit(b, call([&] { ran = true; }));
  executor.synchronize(b, std::nullopt);
  EXPECT_TRUE(ran);
  EXPECT_FALSE(executor.query(a));
  gate->open = true;
  executor.synchronize_device(0, std::nullopt);
  EXPECT_TRUE(executor.query(a));
}

TEST_P(Schedules, WorkGoesOnWhileTheHostIsAway) {
  const auto gate = std::make_shared<Gate>();
  std::atomic<bool> ran{false};
  executor.submit(a, gate);
  executor.submit(a, call([&] { ran = true; }));
  gate->open = true;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!ran && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(ran);
}

TEST_P(Schedules, AFailureEndsWhatIsQueuedBehindItAndIsThrownOnce) {
  const auto gate = std::make_shared<Gate>();
  bool ran = false;
  executor.submit(a, gate);
  executor.submit(a, failing("went wrong"));
  executor.submit(a, call([&] { ran = true; }));
  gate->open = true;
  EXPECT_THROW(executor.synchronize(a, std::nullopt), Failure);
  EXPECT_FALSE(ran);
  EXPECT_NO_THROW(executor.synchronize(a, std::nullopt));
  executor.submit(a, call([&] { ran = true; }));
  executor.synchronize(a, std::nullopt);
  EXPECT_TRUE(ran);
}

TEST_P(Schedules, AFailureReachesAStreamThatWaitsForTheFailedOne) {
  const auto gate = std::make_shared<Gate>();
  const auto event = std::make_shared<Event>(0);
  bool ran = false;
  executor.submit(a, gate);
  executor.submit(a, failing("went wrong"));
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(b, call([&] { ran = true; }));
  gate->open = true;
  try {
    executor.synchronize_device(0, std::nullopt);
    FAIL() << "nothing was thrown";
  } catch (const Failure& failure) {
    EXPECT_STREQ(failure.what(), "went wrong");
  }
  EXPECT_FALSE(ran);
  // It was reported once for both streams.
  EXPECT_NO_THROW(executor.synchronize_device(0, std::nullopt));
}

TEST_P(Schedules, AFullQueueMakesTheHostWait) {
  size_t ran = 0;
  const size_t count = TaskQueues::kDepth + 10;
  const auto gate = std::make_shared<Gate>();
  executor.submit(a, gate);
  std::thread opener([&] {
    std::this_thread::sleep_for(milliseconds(20));
    gate->open = true;
  });
  for (size_t i = 0; i < count; ++i) executor.submit(a, call([&] { ++ran; }));
  EXPECT_TRUE(gate->open);
  opener.join();
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(ran, count);
}

TEST_P(Schedules, ADestroyedStreamHasDoneItsWorkAndTakesNoMore) {
  int ran = 0;
  for (int i = 0; i < 10; ++i) executor.submit(a, call([&] { ++ran; }));
  executor.destroy_stream(a);
  EXPECT_EQ(ran, 10);
  EXPECT_THROW(executor.submit(a, call([] {})), Failure);
}

// --- what a task holds up ------------------------------------------------------------------------

class NeedsDeadlocks final : public Observer {
 public:
  Needs needs() const override { return {.deadlocks = true}; }
};

TEST(Executor, KnowsWhatABlockedTaskHoldsUp) {
  NeedsDeadlocks observer;
  auto& observers = *new Observers();
  observers.add(observer);
  Executor& executor = make_executor(SchedulePolicy::kEager, 0, observers);
  const StreamPtr a = executor.create_stream(0, 0);
  const StreamPtr b = executor.create_stream(0, 0);
  const StreamPtr free = executor.create_stream(0, 0);
  const auto gate = std::make_shared<Gate>();
  const auto elsewhere = std::make_shared<Gate>();
  const auto event = std::make_shared<Event>(0);
  const TaskPtr behind = call([] {});
  const TaskPtr beyond = call([] {});
  executor.submit(a, gate);
  executor.submit(a, behind);
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(b, beyond);
  executor.submit(free, elsewhere);
  std::thread host([&] { executor.synchronize(event, std::nullopt); });
  Executor::Held held;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    held = executor.held_by(*gate);
  } while (held.hosts.empty() && std::chrono::steady_clock::now() < end);
  const auto holds = [&](const TaskPtr& task) {
    return std::find(held.tasks.begin(), held.tasks.end(), task) != held.tasks.end();
  };
  EXPECT_TRUE(holds(behind));
  EXPECT_TRUE(holds(beyond));
  EXPECT_FALSE(holds(elsewhere));
  ASSERT_EQ(held.hosts.size(), 1u);
  EXPECT_EQ(held.hosts[0].event, event.get());
  EXPECT_EQ(held.hosts[0].thread, host.get_id());
  gate->open = elsewhere->open = true;
  host.join();
  executor.synchronize_device(0, std::nullopt);
}

}  // namespace
}  // namespace vnpu
