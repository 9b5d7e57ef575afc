#include "device/checked_sizes.h"

#include <gtest/gtest.h>

#include <limits>

#include "collective/operations.h"
#include "device/memory.h"
#include "device/pinned_memory.h"

namespace vnpu {
namespace {

constexpr size_t kMost = std::numeric_limits<size_t>::max();

TEST(CheckedSizes, WhatFitsIsComputedAndWhatDoesNotIsRefusedByName) {
  EXPECT_EQ(checked_add<size_t>(kMost - 1, 1, "a"), kMost);
  EXPECT_EQ(checked_multiply<int64_t>(-3, 5, "a"), -15);
  EXPECT_EQ(checked_round_up(513, 512, "a"), 1024u);
  EXPECT_THROW(checked_round_up(kMost - 3, 512, "a"), Failure);
  EXPECT_THROW(checked_multiply(std::numeric_limits<int64_t>::min(), int64_t{-1}, "a"), Failure);
  try {
    checked_add<size_t>(kMost, 1, "the size of a thing", FailureKind::kOutOfMemory);
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("the size of a thing does not fit"),
              std::string::npos);
    EXPECT_EQ(failure.kind, FailureKind::kOutOfMemory);
  }
}

TEST(CheckedSizes, ARangeLiesWithinAnotherAlsoAtTheEndOfAllAddresses) {
  EXPECT_TRUE(lies_within(10, 5, 10, 5));
  EXPECT_FALSE(lies_within(9, 1, 10, 5));
  EXPECT_FALSE(lies_within(11, 5, 10, 5));
  EXPECT_FALSE(lies_within(12, kMost - 3, 10, 5));
  EXPECT_TRUE(lies_within(kMost - 4, 4, kMost - 10, 10));
}

TEST(CheckedSizes, MemoryOfSizesNearTheLargestIsRefusedAndNothingIsTaken) {
  Memory& memory = Memory::instance();
  const size_t before = memory.free_bytes(0);
  for (const size_t bytes : {kMost, kMost - 99, kMost - 511, kMost / 2 + 1}) {
    EXPECT_THROW(memory.allocate(0, bytes), Failure) << bytes;
    EXPECT_THROW(memory.reserve(bytes, nullptr), Failure) << bytes;
    EXPECT_THROW(memory.create_physical(0, bytes / Memory::kPage * Memory::kPage), Failure);
  }
  EXPECT_EQ(memory.free_bytes(0), before);
  void* const one = memory.allocate(0, 1024);
  EXPECT_FALSE(memory.is_live(one, kMost));
  EXPECT_FALSE(memory.is_live(static_cast<char*>(one) + 512, kMost - 100));
  EXPECT_THROW(memory.check(one, kMost - 511, "test"), Failure);
  memory.release(one);
}

TEST(CheckedSizes, AMappingWhoseEndsWrapAroundIsRefused) {
  Memory& memory = Memory::instance();
  auto* const range = static_cast<char*>(memory.reserve(2 * Memory::kPage, nullptr));
  const auto physical = memory.create_physical(0, Memory::kPage);
  constexpr size_t kWraps = kMost - Memory::kPage + 1;
  EXPECT_THROW(memory.map(range + Memory::kPage, kWraps, 0, physical), Failure);
  EXPECT_THROW(memory.map(range, Memory::kPage, kWraps, physical), Failure);
  memory.unreserve(range);
}

TEST(CheckedSizes, PinnedMemoryIsComparedWithoutWrappingAround) {
  PinnedMemory& pinned = PinnedMemory::instance();
  char bytes[64];
  pinned.add(bytes, sizeof(bytes), false, true);
  EXPECT_TRUE(pinned.is_mapped(bytes + 1, 63));
  EXPECT_FALSE(pinned.is_mapped(bytes + 1, kMost));
  EXPECT_TRUE(pinned.contains(bytes, 64));
  EXPECT_FALSE(pinned.contains(bytes + 60, 5));
  pinned.remove(bytes, false);
  EXPECT_THROW(pinned.add(bytes, kMost, false, true), Failure);
}

TEST(CheckedSizes, CountsOfCollectivesThatDoNotFitAreRefused) {
  const auto group = std::make_shared<Group>(Segment::create(), 1, 0, 0, "sizes", TimeLimits{});
  Memory& memory = Memory::instance();
  void* const buffer = memory.allocate(0, 1024);
  const auto refused = [](const auto& make) {
    try {
      make();
    } catch (const Failure& failure) {
      return std::string(failure.what()).find("does not fit into 64 bits") != std::string::npos;
    }
    return false;
  };
  constexpr uint64_t kWraps = (kMost >> 2) + 1;  // times 4 bytes: 0
  constexpr ElementType kType = ElementType::kFloat32;
  EXPECT_TRUE(refused([&] { broadcast(group, buffer, kWraps, kType, 0); }));
  EXPECT_TRUE(refused([&] { all_reduce(group, buffer, buffer, kWraps, kType, Reduction::kSum); }));
  EXPECT_TRUE(refused([&] { all_gather(group, buffer, kWraps, buffer, kType); }));
  EXPECT_TRUE(refused([&] { scatter(group, buffer, buffer, kWraps, kType, 0); }));
  EXPECT_TRUE(refused([&] { all_to_all(group, buffer, buffer, kWraps, kType); }));
  EXPECT_TRUE(refused(
      [&] { all_to_all_v(group, buffer, {{8}, {kMost - 3}}, kType, buffer, {{8}, {0}}, kType); }));
  EXPECT_TRUE(
      refused([&] { all_gather_v(group, buffer, kWraps, buffer, {{kWraps}, {0}}, kType); }));
  memory.release(buffer);
}

}  // namespace
}  // namespace vnpu
