#include "device/memory_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "device/memory.h"
#include "tasks.h"

namespace vnpu {
namespace {

constexpr size_t kMegabyte = size_t{1} << 20;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// A watched part of memory, and its number of reported changes.
struct Part {
  Part(uintptr_t begin, size_t bytes)
      : watched(MemoryWatch::instance().watch({begin, begin + bytes}, [this] { ++changes; })) {}
  ~Part() { MemoryWatch::instance().release(watched); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  bool is_unchanged() const { return watched->is_unchanged(); }

  int changes = 0;
  MemoryWatch::WatchedPtr watched;
};

class Watching : public testing::Test {
 protected:
  Watching() : begin_(number(Memory::instance().allocate(0, kBytes))) {}
  ~Watching() override {
    if (begin_ != 0) free_memory();
  }
  void free_memory() {
    Memory::instance().release(reinterpret_cast<void*>(begin_));
    begin_ = 0;
  }
  static void write(uintptr_t begin, size_t bytes) {
    MemoryWatch::instance().changed({begin, begin + bytes});
  }

  static constexpr size_t kBytes = 8 * kMegabyte;
  uintptr_t begin_;
};

TEST_F(Watching, AWriteOfAnyByteEndsAWatchOnce) {
  for (const size_t at : {size_t{0}, size_t{4095}, 3 * kMegabyte - 1}) {
    const Part part(begin_ + 512, 3 * kMegabyte);
    EXPECT_TRUE(part.is_unchanged());
    write(begin_ + 512 + at, 1);
    EXPECT_FALSE(part.is_unchanged());
    EXPECT_EQ(part.changes, 1);
    write(begin_ + 512, 1);
    EXPECT_EQ(part.changes, 1);
  }
}

TEST_F(Watching, WritesBesideItLeaveAWatch) {
  const Part part(begin_ + 512, 1000);
  write(begin_, 512);
  write(begin_ + 1512, kMegabyte);
  write(number(this), sizeof(*this));  // host memory
  EXPECT_TRUE(part.is_unchanged());
  EXPECT_TRUE(MemoryWatch::instance().watches({begin_, begin_ + 513}));
  EXPECT_FALSE(MemoryWatch::instance().watches({begin_, begin_ + 512}));
  EXPECT_FALSE(MemoryWatch::instance().watches({begin_ + 1512, begin_ + kBytes}));
}

TEST_F(Watching, AWriteOverManyPartsEndsThemAll) {
  const Part whole(begin_, kBytes);
  const Part first(begin_, 64);
  const Part last(begin_ + kBytes - 64, 64);
  const Part again(begin_ + kBytes - 64, 64);
  write(begin_ + 64, kBytes - 64);
  EXPECT_FALSE(whole.is_unchanged());
  EXPECT_TRUE(first.is_unchanged());
  EXPECT_FALSE(last.is_unchanged());
  EXPECT_FALSE(again.is_unchanged());
  write(begin_, 1);
  EXPECT_FALSE(first.is_unchanged());
  EXPECT_FALSE(MemoryWatch::instance().watches({begin_, begin_ + kBytes}));
}

TEST_F(Watching, MemoryThatIsGivenBackHasChanged) {
  const Part part(begin_ + kMegabyte, 64);
  free_memory();
  EXPECT_FALSE(part.is_unchanged());
}

TEST_F(Watching, ATaskTellsWhatItWroteWhenItEnds) {
  const Part part(begin_, 64);
  auto gate = std::make_shared<tests::Gate>();
  gate->touched.add_written({begin_ + 4096, begin_ + 4160});
  gate->touched.add_written({begin_ + 8192, begin_ + 8256});
  gate->touched.add_written({begin_, begin_ + 64});
  EXPECT_EQ(gate->step(), Progress::kBlocked);
  EXPECT_TRUE(part.is_unchanged());
  gate->open = true;
  EXPECT_EQ(gate->step(), Progress::kDone);
  EXPECT_FALSE(part.is_unchanged());
}

TEST_F(Watching, ATaskThatFailsMayHaveWritten) {
  const Part part(begin_, 64);
  const TaskPtr task = tests::failing("half done");
  task->touched.add_written({begin_, begin_ + 64});
  EXPECT_THROW(task->step(), Failure);
  EXPECT_FALSE(part.is_unchanged());
}

TEST_F(Watching, MemoryOfOnePlaceAndProcessIsExclusive) {
  Memory& memory = Memory::instance();
  EXPECT_TRUE(memory.is_exclusive(reinterpret_cast<void*>(begin_), kBytes));
  EXPECT_FALSE(memory.is_exclusive(this, sizeof(*this)));
  char* const place = static_cast<char*>(memory.reserve(2 * Memory::kPage, nullptr));
  const auto physical = memory.create_physical(0, Memory::kPage);
  memory.map(place, Memory::kPage, 0, physical);
  EXPECT_TRUE(memory.is_exclusive(place, Memory::kPage));
  {
    const Part part(number(place), 64);
    memory.map(place + Memory::kPage, Memory::kPage, 0, physical);
    EXPECT_FALSE(part.is_unchanged());
  }
  EXPECT_FALSE(memory.is_exclusive(place, 64));
  memory.unmap(place);
  memory.unmap(place + Memory::kPage);
  memory.unreserve(place);
}

TEST_F(Watching, MemoryThatOtherProcessesCanWriteIsNotExclusive) {
  Memory& memory = Memory::instance();
  char* const place = static_cast<char*>(memory.reserve(2 * Memory::kPage, nullptr));
  const auto physical = memory.create_physical(0, Memory::kPage);
  const auto imported = memory.import_physical(physical->identity, 0);
  memory.map(place, Memory::kPage, 0, physical);
  memory.map(place + Memory::kPage, Memory::kPage, 0, imported);
  EXPECT_FALSE(memory.is_exclusive(place + Memory::kPage, 64));
  {
    const Part part(number(place), 64);
    memory.share(*physical);
    EXPECT_FALSE(part.is_unchanged());
  }
  EXPECT_FALSE(memory.is_exclusive(place, 64));
  {
    const Part part(number(place), 64);
    memory.unmap(place);
    EXPECT_FALSE(part.is_unchanged());
  }
  memory.unmap(place + Memory::kPage);
  memory.unreserve(place);
}

}  // namespace
}  // namespace vnpu
