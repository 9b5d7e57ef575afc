#include "triton/elements.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "device/failure.h"
#include "triton/access_log.h"

namespace vnpu::triton {
namespace {

template <class T>
const std::byte* bytes(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

template <class To, class From>
std::vector<To> computed(Operation operation, Type to, Type from, const std::vector<From>& a,
                         const std::vector<From>& b = {}, int64_t attribute = 0) {
  std::vector<To> out(a.size());
  const Operand in[] = {{bytes(a), from}, {bytes(b), from}};
  compute(operation, attribute, reinterpret_cast<std::byte*>(out.data()), to, in, a.size());
  return out;
}

// All values of 8 and 16 bits survive the way to float32 and back.
template <class T>
void expect_round_trip(Type type) {
  std::vector<T> codes(size_t{1} << (8 * sizeof(T)));
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<T>(i);
  const auto wide = computed<float>(Operation::kConvertFloat, Type::kFloat32, type, codes);
  const auto narrow = computed<T>(Operation::kConvertFloat, type, Type::kFloat32, wide);
  for (size_t i = 0; i < codes.size(); ++i) {
    if (std::isnan(wide[i])) continue;
    if (std::isinf(wide[i]) && sizeof(T) == 1) continue;  // becomes the largest
    ASSERT_EQ(narrow[i], codes[i]) << "code " << i << ", " << wide[i];
  }
}

TEST(TritonElements, NarrowFloatsSurviveFloat32) {
  expect_round_trip<uint16_t>(Type::kFloat16);
  expect_round_trip<uint16_t>(Type::kBfloat16);
  expect_round_trip<uint8_t>(Type::kFloat8E4m3);
  expect_round_trip<uint8_t>(Type::kFloat8E5m2);
}

TEST(TritonElements, DoublesRoundOnce) {
  // Next to a tie of bfloat16: float32 would round it to the tie, which then goes to even.
  const std::vector<double> value = {1.00390625 + 0x1p-40};
  const auto rounded =
      computed<uint16_t>(Operation::kConvertFloat, Type::kBfloat16, Type::kFloat64, value);
  EXPECT_EQ(rounded[0], 0x3f81);
}

TEST(TritonElements, IntegersDoNotTrap) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  const std::vector<int32_t> a = {kLeast, kLeast, 7, -7, 1};
  const std::vector<int32_t> b = {-1, 0, 0, 2, 40};
  const auto of = [&](Operation operation) {
    return computed<int32_t>(operation, Type::kInt32, Type::kInt32, a, b);
  };
  EXPECT_EQ(of(Operation::kDivInt), (std::vector<int32_t>{kLeast, 0, 0, -3, 0}));
  EXPECT_EQ(of(Operation::kRemInt), (std::vector<int32_t>{0, 0, 0, -1, 1}));
  EXPECT_EQ(of(Operation::kShiftLeft)[4], 0);
  EXPECT_EQ(of(Operation::kShiftRightSigned)[3], -2);
}

TEST(TritonElements, FloatsOutOfRangeBecomeTheNearestInteger) {
  const std::vector<float> value = {1e20f, -1e20f, NAN, -1.9f};
  const auto whole = computed<int32_t>(Operation::kFloatToInt, Type::kInt32, Type::kFloat32, value);
  EXPECT_EQ(whole, (std::vector<int32_t>{std::numeric_limits<int32_t>::max(),
                                         std::numeric_limits<int32_t>::min(), 0, -1}));
}

TEST(TritonElements, OneBitIsMinusOneWhereItIsSigned) {
  const std::vector<uint8_t> bits = {0, 1};
  EXPECT_EQ(computed<int32_t>(Operation::kExtendInt, Type::kInt32, Type::kInt1, bits)[1], -1);
  EXPECT_EQ(computed<int32_t>(Operation::kExtendUint, Type::kInt32, Type::kInt1, bits)[1], 1);
}

TEST(TritonElements, NaNPassesMaximumAndNotMaxNumber) {
  const std::vector<float> a = {NAN, 1.0f};
  const std::vector<float> b = {2.0f, NAN};
  const auto of = [&](Operation operation) {
    return computed<float>(operation, Type::kFloat32, Type::kFloat32, a, b);
  };
  EXPECT_EQ(of(Operation::kMaxNumber), (std::vector<float>{2.0f, 1.0f}));
  EXPECT_TRUE(std::isnan(of(Operation::kMaximum)[0]) && std::isnan(of(Operation::kMaximum)[1]));
}

TEST(TritonElements, WhatHasNoArithmeticIsRefused) {
  const std::vector<uint8_t> value = {1};
  EXPECT_THROW(computed<uint8_t>(Operation::kExp, Type::kFloat8E4m3, Type::kFloat8E4m3, value),
               Failure);
}

class Programs : public ::testing::Test {
 protected:
  void add(uintptr_t begin, uintptr_t end, uint32_t program, bool write, bool changes = true,
           bool is_atomic = false) {
    log.add({begin, end, program, write, is_atomic, changes, &instruction});
  }
  Instruction instruction{Operation::kStore, "a.py:1", "", {}, {}, {}, {}};
  AccessLog log;
};

TEST_F(Programs, OwnElementsAreNoConflict) {
  for (uint32_t i = 0; i < 4; ++i) {
    add(100 * i, 100 * i + 100, i, false);
    add(100 * i, 100 * i + 100, i, true);
  }
  EXPECT_FALSE(log.conflict().has_value());
  EXPECT_EQ(log.accesses({4, 1, 1}).size(), 2u);  // neighbours are one range
}

TEST_F(Programs, AReadOfWhatAnotherWritesIsAConflict) {
  add(0, 100, 0, true);
  add(0, 200, 1, true);
  const auto conflict = log.conflict();
  ASSERT_TRUE(conflict.has_value());
  EXPECT_NE(conflict->first.program, conflict->second.program);
}

TEST_F(Programs, TheSameBytesAndAtomicUpdatesAreNoConflict) {
  add(0, 100, 0, true);
  add(0, 100, 1, true, false);
  add(200, 204, 0, true, true, true);
  add(200, 204, 1, true, true, true);
  EXPECT_FALSE(log.conflict().has_value());
}

TEST_F(Programs, RowsAtOneDistanceAreOneAccess) {
  for (uint32_t i = 0; i < 8; ++i) add(1000 * i, 1000 * i + 64, i, true);
  const auto accesses = log.accesses({8, 1, 1});
  ASSERT_EQ(accesses.size(), 1u);
  EXPECT_EQ(accesses[0].layout.sizes[0], 8);
  EXPECT_EQ(accesses[0].layout.strides[0], 1000);
}

}  // namespace
}  // namespace vnpu::triton
