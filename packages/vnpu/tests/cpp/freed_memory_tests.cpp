#include "device/freed_memory.h"

#include <gtest/gtest.h>

#include "tasks.h"

namespace vnpu {
namespace {

using tests::call;
using tests::Gate;

using std::chrono::milliseconds;

// Properties that hold under every schedule.
class Frees : public ::testing::TestWithParam<SchedulePolicy> {
 protected:
  Executor& executor = tests::make_executor(GetParam(), 1);
  StreamPtr a = executor.create_stream(0, 0);
  StreamPtr b = executor.create_stream(0, 0);
};

INSTANTIATE_TEST_SUITE_P(All, Frees,
                         ::testing::Values(SchedulePolicy::kEager, SchedulePolicy::kThreads,
                                           SchedulePolicy::kFuzz));

TEST_P(Frees, ADrainGivesUpOnWhatHangsAtOnceTheSecondTime) {
  const auto gate = std::make_shared<Gate>();
  bool ran = false;
  executor.submit(a, gate);
  executor.submit(b, call([&] { ran = true; }));
  EXPECT_FALSE(executor.drain_device(0, milliseconds(100)));
  EXPECT_TRUE(ran);  // what can run has run
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(executor.drain_device(0, std::nullopt));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  const Executor::Tails tails = executor.tails(0);
  EXPECT_FALSE(executor.have_passed(tails));
  gate->open = true;
  EXPECT_TRUE(executor.drain_device(0, std::nullopt));
  EXPECT_TRUE(executor.have_passed(tails));
}

TEST_P(Frees, MemoryThatAHangingTaskMayUseIsGivenBackWhenItHasEnded) {
  Memory& memory = Memory::instance();
  FreedMemory& freed = FreedMemory::instance();
  const size_t before = memory.free_bytes(0);
  constexpr size_t kBytes = size_t{4} << 20;
  auto* const address = static_cast<char*>(memory.allocate(0, kBytes));
  *memory.backing(address + kBytes / 2) = 7;
  const auto gate = std::make_shared<Gate>();
  char seen = 0;
  executor.submit(a, gate);
  executor.submit(a, call([&] { seen = *memory.backing(address + kBytes / 2); }));
  const auto begin = std::chrono::steady_clock::now();
  freed.free(executor, 0, address);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  EXPECT_EQ(memory.free_bytes(0), before);
  EXPECT_FALSE(memory.is_live(address, 1));
  EXPECT_THROW(freed.free(executor, 0, address), Failure);
  freed.collect(executor);
  gate->open = true;
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(seen, 7);
  freed.collect(executor);
  EXPECT_EQ(*memory.backing(address + kBytes / 2), 0);  // its pages have gone back
}

}  // namespace
}  // namespace vnpu
