// Properties of the eager schedule only.

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/executor.h"
#include "tasks.h"

namespace vnpu {
namespace {

using tests::call;
using tests::failing;
using tests::Gate;
using tests::make_executor;

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

}  // namespace
}  // namespace vnpu
