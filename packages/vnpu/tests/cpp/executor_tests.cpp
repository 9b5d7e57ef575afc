#include "device/executor.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "tasks.h"

namespace vnpu {
namespace {

using tests::call;
using tests::failing;
using tests::Gate;
using tests::make_executor;

using std::chrono::milliseconds;

struct Policy {
  const char* name;
  SchedulePolicy policy;
  uint64_t seed;
};

// What holds under every schedule.
class Schedules : public ::testing::TestWithParam<Policy> {
 protected:
  Executor& executor = make_executor(GetParam().policy, GetParam().seed);
  StreamPtr a = executor.create_stream(0, 0);
  StreamPtr b = executor.create_stream(0, 0);
};

INSTANTIATE_TEST_SUITE_P(All, Schedules,
                         ::testing::Values(Policy{"eager", SchedulePolicy::kEager, 0},
                                           Policy{"threads", SchedulePolicy::kThreads, 0},
                                           Policy{"fuzz1", SchedulePolicy::kFuzz, 1},
                                           Policy{"fuzz2", SchedulePolicy::kFuzz, 2}),
                         [](const auto& info) { return info.param.name; });

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

TEST_P(Schedules, ACaptureKeepsWorkOfAllStreamsThatJoinItAndReplaysIt) {
  std::vector<int> ran;
  const auto event = std::make_shared<Event>(0);
  const GraphPtr graph = executor.begin_capture(a);
  executor.submit(a, call([&] { ran.push_back(1); }));
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(b, call([&] { ran.push_back(2); }));
  const auto joined = std::make_shared<Event>(0);
  executor.record(b, joined);
  executor.wait(a, joined);
  executor.submit(a, call([&] { ran.push_back(3); }));
  EXPECT_THROW(executor.synchronize(a, std::nullopt), Failure);
  EXPECT_THROW(executor.end_capture(b), Failure);
  EXPECT_EQ(executor.end_capture(a), graph);
  EXPECT_TRUE(ran.empty());
  EXPECT_EQ(executor.capture_of(b), nullptr);
  for (int i = 0; i < 2; ++i) executor.submit(a, std::make_shared<GraphReplay>(graph));
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(ran, (std::vector<int>{1, 2, 3, 1, 2, 3}));
}

TEST_P(Schedules, ATaskGroupOfAGraphCanBeReplaced) {
  std::string ran;
  const GraphPtr graph = executor.begin_capture(a);
  executor.submit(a, call([&] { ran += 'a'; }));
  executor.begin_group(a);
  executor.submit(a, call([&] { ran += 'b'; }));
  const auto group = executor.end_group(a);
  executor.submit(a, call([&] { ran += 'c'; }));
  executor.end_capture(a);
  executor.begin_update(b, group);
  executor.submit(b, call([&] { ran += 'B'; }));
  EXPECT_THROW(executor.submit(b, call([] {})), Failure);  // the group holds one task
  executor.end_update(b);
  const auto updated = std::make_shared<Event>(0);
  executor.record(b, updated);
  executor.wait(a, updated);
  executor.submit(a, std::make_shared<GraphReplay>(graph));
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(ran, "aBc");
}

TEST_P(Schedules, AStreamThatDoesNotComeBackIsNamedWhenItsCaptureEnds) {
  const auto event = std::make_shared<Event>(0);
  executor.begin_capture(a);
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(b, call([] {}));
  try {
    executor.end_capture(a);
    FAIL() << "the capture ended";
  } catch (const CaptureFailure& failure) {
    EXPECT_EQ(failure.rule, CaptureRule::kUnjoined);
  }
  EXPECT_EQ(executor.capture_of(b), nullptr);  // and the streams are free again
}

TEST_P(Schedules, ASynchronousCallIsRefusedWhileACaptureMindsIt) {
  executor.begin_capture(a, CaptureMode::kGlobal);
  EXPECT_THROW(executor.check_synchronous(CaptureMode::kGlobal, "a copy"), CaptureFailure);
  EXPECT_NO_THROW(executor.check_synchronous(CaptureMode::kRelaxed, "a copy"));
  executor.end_capture(a);
  executor.begin_capture(a, CaptureMode::kRelaxed);
  EXPECT_NO_THROW(executor.check_synchronous(CaptureMode::kGlobal, "a copy"));
  executor.end_capture(a);
  EXPECT_NO_THROW(executor.check_synchronous(CaptureMode::kGlobal, "a copy"));
}

TEST_P(Schedules, TaskGroupsOfOneCaptureDoNotOverlap) {
  const auto event = std::make_shared<Event>(0);
  executor.begin_capture(a);
  executor.record(a, event);
  executor.wait(b, event);
  executor.begin_group(a);
  EXPECT_THROW(executor.begin_group(b), CaptureFailure);
  EXPECT_THROW(executor.submit(b, call([] {})), CaptureFailure);
  EXPECT_THROW(executor.end_group(b), CaptureFailure);
  executor.end_group(a);
  executor.end_capture(a);
}

// --- what tells the schedules apart --------------------------------------------------------------

TEST(EagerSchedule, RunsOnTheLaunchingThreadAndThrowsThere) {
  Executor& executor = make_executor(SchedulePolicy::kEager);
  const StreamPtr stream = executor.create_stream(0, 0);
  std::thread::id ran_on;
  executor.submit(stream, call([&] { ran_on = std::this_thread::get_id(); }));
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_THROW(executor.submit(stream, failing("went wrong")), Failure);
}

TEST(EagerSchedule, DoesWhatIsLongBesideTheHost) {
  Executor& executor = make_executor(SchedulePolicy::kEager);
  const StreamPtr a = executor.create_stream(0, 0);
  const StreamPtr b = executor.create_stream(0, 0);
  std::atomic<bool> goes_on{false};
  std::string ran;
  executor.submit(a, tests::long_call([&] {
                    EXPECT_TRUE(tests::becomes_true(goes_on));
                    ran += 'a';
                  }));
  executor.submit(a, call([&] { ran += 'b'; }));
  std::thread::id ran_on;
  executor.submit(b, call([&] { ran_on = std::this_thread::get_id(); }));
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_FALSE(executor.query(a));
  goes_on = true;
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(ran, "ab");
}

TEST(EagerSchedule, RunsWhatIsLongWhileAHostThreadWaitsForSomethingElse) {
  Executor& executor = make_executor(SchedulePolicy::kEager);
  const StreamPtr a = executor.create_stream(0, 0);
  const StreamPtr b = executor.create_stream(0, 0);
  const auto gate = std::make_shared<Gate>();
  executor.submit(b, gate);
  std::thread waiting([&] { executor.synchronize(b, std::nullopt); });
  std::atomic<bool> ran{false};
  executor.submit(a, tests::long_call([&] { ran = true; }));
  EXPECT_TRUE(tests::becomes_true(ran));
  gate->open = true;
  waiting.join();
}

TEST(ThreadsSchedule, RunsStreamsBesideEachOther) {
  Executor& executor = make_executor(SchedulePolicy::kThreads);
  const StreamPtr a = executor.create_stream(0, 0);
  const StreamPtr b = executor.create_stream(0, 0);
  std::atomic<int> inside{0};
  const auto meet = [&inside] {
    ++inside;
    while (inside < 2) std::this_thread::yield();
  };
  executor.submit(a, call(meet));
  executor.submit(b, call(meet));
  executor.synchronize_device(0, std::nullopt);
  EXPECT_EQ(inside, 2);
}

// The order in which a seed runs the tasks of three streams that nothing orders.
std::string fuzzed_order(uint64_t seed) {
  Executor& executor = make_executor(SchedulePolicy::kFuzz, seed);
  std::string order;
  std::vector<StreamPtr> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(executor.create_stream(0, 0));
  for (int task = 0; task < 8; ++task) {
    for (int i = 0; i < 3; ++i) {
      const char letter = static_cast<char>('a' + i);
      executor.submit(streams[static_cast<size_t>(i)], call([&order, letter] { order += letter; }));
    }
  }
  executor.synchronize_device(0, std::nullopt);
  return order;
}

TEST(FuzzSchedule, TheSeedDecidesTheOrder) {
  const std::string first = fuzzed_order(1);
  EXPECT_EQ(first.size(), 24u);
  EXPECT_NE(first, fuzzed_order(2));
  // While the host rests, and be it because the machine is busy, the background thread takes over.
  bool same = false;
  for (int i = 0; i < 5 && !same; ++i) same = fuzzed_order(1) == fuzzed_order(1);
  EXPECT_TRUE(same);
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
