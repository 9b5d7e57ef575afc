#include "race/detector.h"

#include <gtest/gtest.h>

#include "device/memory.h"
#include "device/pinned_memory.h"
#include "race/overlap.h"
#include "tasks.h"

namespace vnpu::race {
namespace {

using tests::make_executor;
using tests::use;

constexpr size_t kBytes = 4096;

class Races : public ::testing::Test {
 protected:
  Races() { observers.add(detector); }
  ~Races() override { Memory::instance().release(memory); }

  // A launch that the detector refuses throws; the next one is checked again.
  bool races(const StreamPtr& stream, const TaskPtr& task) {
    try {
      executor.submit(stream, task);
      return false;
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.kind, FailureKind::kRace);
      text = failure.what();
      return true;
    }
  }
  char* byte(size_t i) const { return static_cast<char*>(memory) + i; }

  Detector& detector = *new Detector(true);
  Observers& observers = *new Observers();
  Executor& executor = make_executor(SchedulePolicy::kEager, 0, observers);
  StreamPtr a = executor.create_stream(0, 0);
  StreamPtr b = executor.create_stream(0, 0);
  EventPtr event = std::make_shared<Event>(0);
  void* const memory = Memory::instance().allocate(0, kBytes);
  std::string text;
};

TEST_F(Races, TwoStreamsThatNothingOrders) {
  EXPECT_FALSE(races(a, use(memory, kBytes, true, "writer")));
  EXPECT_TRUE(races(b, use(byte(100), 8, false, "reader")));
  EXPECT_NE(text.find("race on 8 bytes at byte 100 of allocation #"), std::string::npos) << text;
  EXPECT_NE(text.find("write by writer on stream 0"), std::string::npos) << text;
  EXPECT_NE(text.find("read by reader on stream 1"), std::string::npos) << text;
  EXPECT_EQ(detector.found(), 1u);
}

TEST_F(Races, MemoryIsFreedBehindAWaitForWhatUsesIt) {
  const auto frees = [&] {
    try {
      executor.tell(&Observer::on_device_free, memory, kBytes, "aclrtFree", std::string());
      return true;
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.kind, FailureKind::kRace);
      text = failure.what();
      return false;
    }
  };
  EXPECT_FALSE(races(a, use(byte(100), 8, false, "reader")));
  EXPECT_FALSE(frees());
  EXPECT_NE(text.find("race on 8 bytes at byte 100 of allocation #"), std::string::npos) << text;
  EXPECT_NE(text.find("read by reader on stream 0"), std::string::npos) << text;
  EXPECT_NE(text.find("freed by the host at"), std::string::npos) << text;
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  executor.drain_device(0, std::nullopt);  // has run, but the program has not waited
  EXPECT_FALSE(frees());
  EXPECT_FALSE(races(b, use(memory, kBytes, true)));  // of the next owner
  executor.synchronize(b, std::nullopt);
  EXPECT_TRUE(frees());
}

TEST_F(Races, ReadsDoNotRace) {
  EXPECT_FALSE(races(a, use(memory, kBytes, false)));
  EXPECT_FALSE(races(b, use(memory, kBytes, false)));
}

TEST_F(Races, ALaterWriteRacesWithARead) {
  EXPECT_FALSE(races(a, use(memory, kBytes, false)));
  EXPECT_TRUE(races(b, use(memory, kBytes, true)));
}

TEST_F(Races, OneStreamIsInOrder) {
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
}

TEST_F(Races, AnEventOrders) {
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  executor.record(a, event);
  executor.wait(b, event);
  EXPECT_FALSE(races(b, use(memory, kBytes, true)));
}

TEST_F(Races, ARecordBeforeTheLaunchDoesNotOrderIt) {
  executor.record(a, event);
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  executor.wait(b, event);
  EXPECT_TRUE(races(b, use(memory, kBytes, true)));
}

TEST_F(Races, EventsOrderThroughAThirdStream) {
  const StreamPtr between = executor.create_stream(0, 0);
  const auto second = std::make_shared<Event>(0);
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  executor.record(a, event);
  executor.wait(between, event);
  executor.record(between, second);
  executor.wait(b, second);
  EXPECT_FALSE(races(b, use(memory, kBytes, true)));
}

TEST_F(Races, AWaitOfTheHostOrders) {
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  executor.synchronize(a, std::nullopt);
  EXPECT_FALSE(races(b, use(memory, kBytes, true)));
  executor.record(b, event);
  EXPECT_TRUE(executor.query(event));
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
}

TEST_F(Races, AWaitForAnEventThatWasNeverRecordedIsReported) {
  try {
    executor.wait(b, event);
    FAIL() << "nothing was thrown";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("never recorded"), std::string::npos);
  }
}

TEST_F(Races, NeighbouringBytesDoNotRace) {
  EXPECT_FALSE(races(a, use(memory, 512, true)));
  EXPECT_FALSE(races(b, use(byte(512), 512, true)));
}

TEST_F(Races, WithinACaptureTheSameHolds) {
  const auto joined = std::make_shared<Event>(0);
  executor.begin_capture(a);
  executor.record(a, event);
  executor.wait(b, event);
  EXPECT_FALSE(races(a, use(memory, kBytes, true)));
  EXPECT_TRUE(races(b, use(memory, kBytes, false)));
  executor.record(a, joined);
  executor.wait(b, joined);
  EXPECT_FALSE(races(b, use(memory, kBytes, true)));
  executor.record(b, joined);
  executor.wait(a, joined);
  executor.end_capture(a);
}

TEST_F(Races, TheHostMustNotChangePinnedMemoryThatACopyMayRead) {
  static char pinned[64] = {};
  PinnedMemory::instance().add(pinned, sizeof(pinned), true);
  EXPECT_FALSE(races(a, use(pinned, sizeof(pinned), false, "memory copy")));
  executor.synchronize(a, std::nullopt);
  pinned[3] = 1;  // after the wait
  EXPECT_FALSE(races(a, use(pinned, sizeof(pinned), false, "memory copy")));
  pinned[3] = 2;
  try {
    executor.synchronize(a, std::nullopt);
    FAIL() << "the change was not noticed";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("pinned host memory"), std::string::npos);
  }
  PinnedMemory::instance().remove(pinned, true);
}

TEST_F(Races, AReportingDetectorLetsTheLaunchPass) {
  auto& reporting = *new Detector(false);
  auto& others = *new Observers();
  others.add(reporting);
  Executor& lenient = make_executor(SchedulePolicy::kEager, 0, others);
  const StreamPtr first = lenient.create_stream(0, 0);
  const StreamPtr second = lenient.create_stream(0, 0);
  lenient.submit(first, use(memory, kBytes, true));
  ::testing::internal::CaptureStderr();
  lenient.submit(second, use(memory, kBytes, true));
  lenient.submit(second, use(memory, kBytes, true));  // the same pair of lines: reported once
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("vnpu: race on 4096 bytes"), std::string::npos) << said;
  EXPECT_EQ(reporting.found(), 1u);
}

// --- strided accesses ----------------------------------------------------------------------------

// `count` rows of `width` bytes, `stride` apart, from `begin`.
Access rows(uintptr_t begin, int64_t count, int64_t width, int64_t stride) {
  Access access{begin, begin + static_cast<uintptr_t>((count - 1) * stride + width), true};
  access.layout.dims = 2;
  access.layout.item = 1;
  access.layout.sizes[0] = count;
  access.layout.sizes[1] = width;
  access.layout.strides[0] = stride;
  access.layout.strides[1] = 1;
  return access;
}

TEST(Overlap, ColumnsOfOneMatrixThatLieBetweenEachOtherShareNothing) {
  EXPECT_FALSE(overlap(rows(1000, 8, 16, 64), rows(1016, 8, 16, 64)));
  EXPECT_FALSE(overlap(rows(1016, 8, 16, 64), rows(1000, 8, 16, 64)));
  EXPECT_TRUE(overlap(rows(1000, 8, 17, 64), rows(1016, 8, 16, 64)));
}

TEST(Overlap, ADenseRangeMeetsWhatItContains) {
  const Access dense{1000, 1600, true};
  EXPECT_TRUE(overlap(dense, rows(1016, 8, 16, 64)));
  const Access gap{1040, 1064, true};  // between two rows
  EXPECT_FALSE(overlap(gap, rows(1000, 8, 16, 64)));
  EXPECT_FALSE(overlap({1000, 1010, true}, {1010, 1020, true}));
}

}  // namespace
}  // namespace vnpu::race
