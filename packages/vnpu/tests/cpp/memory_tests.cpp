#include "device/memory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "allocation.h"
#include "device/failure.h"
#include "failures.h"

namespace vnpu {
namespace {

constexpr size_t kMegabyte = size_t{1} << 20;

char* at(void* address) { return static_cast<char*>(address); }

using tests::message_of;

TEST(Memory, DevicesHaveRangesOfTheirOwn) {
  Memory& memory = Memory::instance();
  void* first = memory.allocate(0, kMegabyte);
  const size_t free_before = memory.free_bytes(1);
  void* second = memory.allocate(1, kMegabyte);
  EXPECT_EQ(memory.free_bytes(1), free_before - kMegabyte);
  EXPECT_NE(memory.describe(first).find("device 0"), std::string::npos);
  EXPECT_NE(memory.describe(second).find("device 1"), std::string::npos);
  memory.release(first);
  memory.release(second);
  EXPECT_EQ(memory.free_bytes(1), free_before);
}

TEST(Memory, ARangeIsLiveWithinOneAllocationOnly) {
  Memory& memory = Memory::instance();
  void* a = memory.allocate(0, 1024);
  void* b = memory.allocate(0, 1024);
  EXPECT_TRUE(memory.is_live(at(a) + 1, 1023));
  EXPECT_FALSE(memory.is_live(at(a) + 1, 1024));
  EXPECT_FALSE(memory.is_live(at(a) - 1, 2));
  memory.release(b);
  EXPECT_FALSE(memory.is_live(b, 1));
  EXPECT_TRUE(memory.is_live(a, 1024));
  memory.release(a);
}

TEST(Memory, AnErrorTellsTheHistoryOfTheAddress) {
  Memory& memory = Memory::instance();
  void* freed = memory.allocate(0, 1024);
  memory.release(freed);
  const std::string text =
      message_of([&] { memory.check(at(freed) + 8, 4, "aclnnAdd argument 2"); });
  EXPECT_NE(text.find("aclnnAdd argument 2"), std::string::npos) << text;
  EXPECT_NE(text.find("byte 8 of allocation #"), std::string::npos) << text;
  EXPECT_NE(text.find("use after free"), std::string::npos) << text;
  EXPECT_NE(message_of([&] { memory.check(nullptr, 1, "x"); }).find("null address"),
            std::string::npos);
  int on_host = 0;
  EXPECT_NE(message_of([&] { memory.check(&on_host, 1, "x"); }).find("host memory"),
            std::string::npos);
}

TEST(Memory, OperatorsReachTheBytesThroughTheBacking) {
  Memory& memory = Memory::instance();
  void* a = memory.allocate(0, 1024);
  char* bytes = memory.backing(at(a));
  EXPECT_NE(bytes, at(a));
  EXPECT_EQ(memory.backing(at(a) + 100), bytes + 100);
  bytes[0] = 7;
  EXPECT_EQ(*memory.backing(at(a)), 7);
  char on_host = 0;
  EXPECT_EQ(memory.backing(&on_host), &on_host);
  memory.release(a);
}

volatile char* touched = nullptr;

TEST(MemoryDeathTest, TheExplanationIsWrittenWithoutAnAllocation) {
  Memory& memory = Memory::instance();
  void* a = memory.allocate(0, 1024);
  const auto touch = [&] {
    tests::before_allocation = [] { ::_exit(3); };
    *(static_cast<volatile char*>(a) + 100) = 1;
  };
  EXPECT_EXIT(touch(), ::testing::KilledBySignal(SIGSEGV),
              "byte 100 of allocation #[0-9]+ on device 0, 1024 bytes, live");
  memory.release(a);
}

TEST(MemoryDeathTest, TheExplanationIsWrittenWhileThisThreadChangesWhatMemoryThereIs) {
  Memory& memory = Memory::instance();
  touched = static_cast<volatile char*>(memory.allocate(0, 1024));
  // The memory is entered in a list while the lock is held, and a list allocates: a handler that
  // waits for the lock never ends.
  const auto touch = [&] {
    ::alarm(20);
    tests::before_allocation = [] { *touched = 1; };
    memory.allocate(0, 1024);
  };
  EXPECT_EXIT(touch(), ::testing::KilledBySignal(SIGSEGV), "host code touched device memory");
  memory.release(const_cast<char*>(touched));
}

TEST(Memory, ZeroFillsExactlyTheRange) {
  Memory& memory = Memory::instance();
  constexpr size_t kBytes = 3 * kMegabyte;
  void* a = memory.allocate(0, kBytes);
  char* bytes = memory.backing(at(a));
  std::memset(bytes, 1, kBytes);
  memory.zero(at(a) + 10, kBytes - 20);  // large enough to give pages back
  EXPECT_EQ(bytes[9], 1);
  EXPECT_EQ(bytes[kBytes - 10], 1);
  for (size_t i = 10; i < kBytes - 10; ++i) ASSERT_EQ(bytes[i], 0) << i;
  memory.release(a);
}

TEST(Memory, APhysicalHandleCanBeMappedTwice) {
  Memory& memory = Memory::instance();
  const size_t free_before = memory.free_bytes(0);
  void* range = memory.reserve(2 * Memory::kPage, nullptr);
  auto physical = memory.create_physical(0, Memory::kPage);
  EXPECT_EQ(memory.free_bytes(0), free_before - Memory::kPage);
  memory.map(range, Memory::kPage, 0, physical);
  memory.map(at(range) + Memory::kPage, Memory::kPage, 0, physical);
  *memory.backing(at(range)) = 5;
  EXPECT_EQ(*memory.backing(at(range) + Memory::kPage), 5);
  // Neighbouring mappings are one usable range.
  EXPECT_TRUE(memory.is_live(range, 2 * Memory::kPage));
  EXPECT_THROW(memory.map(range, Memory::kPage, 0, physical), Failure);
  memory.unmap(range);
  memory.unmap(at(range) + Memory::kPage);
  EXPECT_FALSE(memory.is_live(range, 1));
  memory.unreserve(range);
  physical.reset();
  EXPECT_EQ(memory.free_bytes(0), free_before);
}

TEST(Memory, WhatWasExportedIsFoundByItsIdentityAndByNothingElse) {
  Memory& memory = Memory::instance();
  auto physical = memory.create_physical(0, 2 * Memory::kPage);
  const uint64_t identity = physical->identity;
  const auto imported = memory.import_physical(identity, 1);
  EXPECT_EQ(imported->bytes, 2 * Memory::kPage);
  EXPECT_EQ(memory.free_bytes(1), memory.total_bytes(1));  // it is the other device's
  EXPECT_THROW(memory.import_physical(identity + 1, 0), Failure);
}

TEST(Memory, AnExportThatWasFreedIsRefusedAlsoWhereAFileHasItsDescriptor) {
  Memory& memory = Memory::instance();
  auto physical = memory.create_physical(0, Memory::kPage);
  const uint64_t identity = physical->identity;
  const int number = physical->file;
  physical.reset();
  char name[] = "/tmp/vnpu-memory-test-XXXXXX";
  const int file = ::mkstemp(name);
  ASSERT_GE(file, 0);
  ASSERT_EQ(file, number);  // the user's file has taken the descriptor's number
  ASSERT_EQ(::write(file, "mine", 4), 4);
  const std::string text = message_of([&] { memory.import_physical(identity, 0); });
  EXPECT_NE(text.find("it was freed there"), std::string::npos) << text;
  struct stat info = {};
  ::fstat(file, &info);
  EXPECT_EQ(info.st_size, 4);
  ::close(file);
  ::unlink(name);
  EXPECT_NE(message_of([&] { memory.import_physical(~uint64_t{0}, 0); }).find("has ended"),
            std::string::npos);
}

TEST(Memory, ExportedMemoryCannotBeMadeShorterUnderItsReaders) {
  const auto physical = Memory::instance().create_physical(0, Memory::kPage);
  EXPECT_EQ(::ftruncate(physical->file, 0), -1);
}

}  // namespace
}  // namespace vnpu
