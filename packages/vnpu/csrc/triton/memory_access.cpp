// Loads, stores and atomic operations of kernels: every address is checked, then translated.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "device/memory.h"
#include "device/memory_watch.h"
#include "triton/elements.h"
#include "triton/machine.h"

namespace vnpu::triton {
namespace {

// Atomic operations of other streams' kernels, under schedules that run them at the same time.
std::mutex atomic_mutex;

std::string hexadecimal(uintptr_t address) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%zx", static_cast<size_t>(address));
  return text;
}

// Value of masked lanes, which are undefined: NaN, a large negative integer, or an invalid address.
uint64_t poison_of(Type type) {
  switch (type) {
    case Type::kInt1: return 0;
    case Type::kFloat16: return 0x7e00;
    case Type::kBfloat16: return 0x7fc0;
    case Type::kFloat32: return 0x7fc00000;
    case Type::kFloat64: return 0x7ff8000000000000;
    case Type::kFloat8E4m3: return 0x7f;
    case Type::kFloat8E5m2: return 0x7e;
    default: return 0xaaaaaaaaaaaaaaaa;
  }
}

}  // namespace

// Addresses of an instruction's lanes, and which of them are active.
struct Machine::Lanes {
  const uint64_t* addresses;
  const uint8_t* mask;  // null: all active
  size_t count;
  size_t bytes;          // of an element
  size_t first = 0;      // active lane
  size_t end = 0;        // behind the last active one; first == end: none
  bool is_row = true;    // neighbours in memory, too
  bool is_dense = true;  // no inactive lane between first and end
  uintptr_t low = 0;     // of the active lanes
  uintptr_t high = 0;

  bool is_active(size_t lane) const { return mask == nullptr || mask[lane] != 0; }
};

Machine::Lanes Machine::lanes_of(const Instruction& instruction, size_t bytes,
                                 size_t mask_operand) {
  Lanes lanes{.addresses = as<uint64_t>(instruction.operands[0]),
              .mask = mask_operand < instruction.operands.size()
                          ? as<uint8_t>(instruction.operands[mask_operand])
                          : nullptr,
              .count = value(instruction.operands[0]).count,
              .bytes = bytes};
  lanes.end = lanes.count;
  if (lanes.mask != nullptr) {
    const auto* const found = static_cast<const uint8_t*>(std::memchr(lanes.mask, 1, lanes.count));
    if (found == nullptr) {
      lanes.end = 0;
      return lanes;
    }
    lanes.first = static_cast<size_t>(found - lanes.mask);
    while (lanes.mask[lanes.end - 1] == 0) --lanes.end;
    lanes.is_dense = std::memchr(found, 0, lanes.end - lanes.first) == nullptr;
  }
  const uint64_t start = lanes.addresses[lanes.first];
  uint64_t difference = 0;
  for (size_t i = lanes.first; i < lanes.end; ++i) {
    difference |= lanes.addresses[i] ^ (start + (i - lanes.first) * bytes);
  }
  lanes.is_row = difference == 0;
  if (lanes.is_row) {
    lanes.low = start;
    lanes.high = start + (lanes.end - lanes.first) * bytes;
    return lanes;
  }
  lanes.low = ~uintptr_t{0};
  for (size_t i = lanes.first; i < lanes.end; ++i) {
    if (!lanes.is_active(i)) continue;
    lanes.low = std::min<uintptr_t>(lanes.low, lanes.addresses[i]);
    lanes.high = std::max<uintptr_t>(lanes.high, lanes.addresses[i] + bytes);
  }
  return lanes;
}

// Attribute 0 of an instruction: the parameter from which its addresses come, or -1.
void Machine::require(const Instruction& instruction, const Lanes& lanes, const char* what) {
  const Memory& memory = Memory::instance();
  const int64_t root = instruction.attributes[0];
  const Launch::Range storage =
      root < 0 ? Launch::Range() : launch_.storages[static_cast<size_t>(root)];
  const auto lies_within = [&](uintptr_t low, uintptr_t high) {
    if (storage.end != 0 && (low < storage.begin || high > storage.end)) return false;
    return memory.is_live(reinterpret_cast<const void*>(low), high - low);
  };
  if (lies_within(lanes.low, lanes.high)) return;
  for (size_t i = lanes.first; i < lanes.end; ++i) {
    const uintptr_t at = lanes.addresses[i];
    if (!lanes.is_active(i) || lies_within(at, at + lanes.bytes)) continue;
    std::string text = std::string(what) + " of lane " + std::to_string(i) + ", " +
                       std::to_string(lanes.bytes) + " bytes at " + hexadecimal(at);
    if (storage.end != 0 && (at < storage.begin || at + lanes.bytes > storage.end)) {
      const bool is_before = at < storage.begin;
      text += ", which lies " +
              std::to_string(is_before ? storage.begin - at : at - storage.begin) + " bytes " +
              (is_before ? "before" : "behind") + " the begin of " +
              program_.parameters[static_cast<size_t>(root)].name + ", a tensor with " +
              std::to_string(storage.end - storage.begin) + " bytes of memory. Mask the lane.";
    } else if (memory.is_device_address(reinterpret_cast<const void*>(at))) {
      text += ", which lies in no live allocation: " +
              memory.describe(reinterpret_cast<const void*>(at)) + ".";
    } else {
      text += ", which is no address of the device. Pass tensors on `npu`, or pinned ones.";
    }
    fail(instruction, FailureKind::kIllegalAddress, text);
  }
}

void Machine::note(const Instruction& instruction, const Lanes& lanes, bool write, bool is_atomic,
                   bool changes) {
  const auto number = id_[0] + launch_.grid[0] * (id_[1] + launch_.grid[1] * id_[2]);
  const auto add = [&](uintptr_t begin, uintptr_t end) {
    log_->add({begin, end, number, write, is_atomic, changes, &instruction});
  };
  if (lanes.is_row && lanes.is_dense) return add(lanes.low, lanes.high);
  std::vector<uintptr_t> addresses;
  for (size_t i = lanes.first; i < lanes.end; ++i) {
    if (lanes.is_active(i)) addresses.push_back(lanes.addresses[i]);
  }
  std::ranges::sort(addresses);
  for (size_t i = 0; i < addresses.size();) {
    const uintptr_t begin = addresses[i];
    uintptr_t end = begin + lanes.bytes;
    for (++i; i < addresses.size() && addresses[i] <= end; ++i) end = addresses[i] + lanes.bytes;
    add(begin, end);
  }
}

// Operands: addresses, mask, and what inactive lanes get.
void Machine::load(const Instruction& instruction) {
  const Value& result = value(instruction.results[0]);
  const size_t bytes = bytes_of(result.type);
  const Lanes lanes = lanes_of(instruction, bytes, 1);
  std::byte* const to = frame_ + result.offset;
  if (lanes.mask != nullptr && !(lanes.is_dense && lanes.first == 0 && lanes.end == lanes.count)) {
    if (instruction.operands.size() > 2) {
      std::memcpy(to, data(instruction.operands[2]), lanes.count * bytes);
    } else {
      const uint64_t undefined = settings_.poisons ? poison_of(result.type) : 0;
      fill(to, bytes, reinterpret_cast<const std::byte*>(&undefined), lanes.count);
    }
  }
  if (lanes.first == lanes.end) return;
  require(instruction, lanes, "a load");
  if (log_ != nullptr) note(instruction, lanes, false, false, false);
  const Memory& memory = Memory::instance();
  if (lanes.is_row && lanes.is_dense) {
    const auto* const from = memory.backing(reinterpret_cast<const std::byte*>(lanes.low));
    std::memcpy(to + lanes.first * bytes, from, lanes.high - lanes.low);
  } else {
    for (size_t i = lanes.first; i < lanes.end; ++i) {
      if (!lanes.is_active(i)) continue;
      const auto* const from =
          memory.backing(reinterpret_cast<const std::byte*>(lanes.addresses[i]));
      std::memcpy(to + i * bytes, from, bytes);
    }
  }
  if (result.type == Type::kInt1) {
    for (size_t i = lanes.first; i < lanes.end; ++i) to[i] = std::byte{to[i] != std::byte{0}};
  }
}

// Operands: addresses, values, mask.
void Machine::store(const Instruction& instruction) {
  const Value& stored = value(instruction.operands[1]);
  const size_t bytes = bytes_of(stored.type);
  const Lanes lanes = lanes_of(instruction, bytes, 2);
  if (lanes.first == lanes.end) return;
  require(instruction, lanes, "a store");
  ++stores_;
  const std::byte* const from = frame_ + stored.offset;
  const Memory& memory = Memory::instance();
  bool changes = false;
  for (size_t i = lanes.first; i < lanes.end; ++i) {
    std::byte* to = memory.backing(reinterpret_cast<std::byte*>(lanes.addresses[i]));
    if (lanes.is_row && lanes.is_dense) {
      const size_t all = lanes.high - lanes.low;
      changes = log_ != nullptr && std::memcmp(to, from + i * bytes, all) != 0;
      std::memcpy(to, from + i * bytes, all);
      break;
    }
    if (!lanes.is_active(i)) continue;
    changes |= log_ != nullptr && std::memcmp(to, from + i * bytes, bytes) != 0;
    std::memcpy(to, from + i * bytes, bytes);
  }
  if (log_ != nullptr) note(instruction, lanes, true, false, changes);
  MemoryWatch::instance().changed({lanes.low, lanes.high});
}

namespace {

// mlir::triton::RMWOp
enum Update : int64_t {
  kAnd = 1,
  kOr,
  kXor,
  kAdd,
  kFloatAdd,
  kMax,
  kMin,
  kUnsignedMax,
  kUnsignedMin,
  kExchange
};

template <class T>
T updated(int64_t update, T old, T operand) {
  using U = std::make_unsigned_t<T>;
  switch (update) {
    case kAnd: return old & operand;
    case kOr: return old | operand;
    case kXor: return old ^ operand;
    case kAdd: return static_cast<T>(static_cast<U>(old) + static_cast<U>(operand));
    case kMax: return std::max(old, operand);
    case kMin: return std::min(old, operand);
    case kUnsignedMax:
      return static_cast<T>(std::max(static_cast<U>(old), static_cast<U>(operand)));
    case kUnsignedMin:
      return static_cast<T>(std::min(static_cast<U>(old), static_cast<U>(operand)));
    default: return operand;
  }
}

template <class T>
void update_at(std::byte* place, std::byte* old, const std::byte* operand, int64_t update) {
  T before;
  T value;
  std::memcpy(&before, place, sizeof(T));
  std::memcpy(&value, operand, sizeof(T));
  const T after = updated(update, before, value);
  std::memcpy(place, &after, sizeof(T));
  std::memcpy(old, &before, sizeof(T));
}

}  // namespace

// Operands: addresses, values, mask. Attribute 1: the update. One lane after the other.
void Machine::atomic(const Instruction& instruction) {
  const Value& result = value(instruction.results[0]);
  const size_t bytes = bytes_of(result.type);
  const Lanes lanes = lanes_of(instruction, bytes, 2);
  std::memset(frame_ + result.offset, 0, lanes.count * bytes);
  if (lanes.first == lanes.end) return;
  require(instruction, lanes, "an atomic update");
  ++stores_;
  const int64_t update = instruction.attributes[1];
  const std::lock_guard lock(atomic_mutex);
  for (size_t i = lanes.first; i < lanes.end; ++i) {
    if (!lanes.is_active(i)) continue;
    std::byte* const place =
        Memory::instance().backing(reinterpret_cast<std::byte*>(lanes.addresses[i]));
    std::byte* const old = frame_ + result.offset + i * bytes;
    const std::byte* const operand = data(instruction.operands[1]) + i * bytes;
    if (update == kFloatAdd) {
      const Operand in[] = {{place, result.type}, {operand, result.type}};
      std::byte sum[8];
      compute(Operation::kAddFloat, 0, sum, result.type, in, 1);
      std::memcpy(old, place, bytes);
      std::memcpy(place, sum, bytes);
    } else if (bytes == 4) {
      update_at<int32_t>(place, old, operand, update);
    } else if (bytes == 8) {
      update_at<int64_t>(place, old, operand, update);
    } else if (bytes == 2) {
      update_at<int16_t>(place, old, operand, update);
    } else {
      update_at<int8_t>(place, old, operand, update);
    }
  }
  if (log_ != nullptr) note(instruction, lanes, true, true, true);
  MemoryWatch::instance().changed({lanes.low, lanes.high});
}

// Operands: addresses, what must be there, what comes there then.
void Machine::compare_and_swap(const Instruction& instruction) {
  const Value& result = value(instruction.results[0]);
  const size_t bytes = bytes_of(result.type);
  const Lanes lanes = lanes_of(instruction, bytes, 3);
  require(instruction, lanes, "an atomic exchange");
  const std::lock_guard lock(atomic_mutex);
  for (size_t i = 0; i < lanes.count; ++i) {
    std::byte* const place =
        Memory::instance().backing(reinterpret_cast<std::byte*>(lanes.addresses[i]));
    const bool is_equal = std::memcmp(place, data(instruction.operands[1]) + i * bytes, bytes) == 0;
    std::memcpy(frame_ + result.offset + i * bytes, place, bytes);
    if (!is_equal) continue;
    ++stores_;
    std::memcpy(place, data(instruction.operands[2]) + i * bytes, bytes);
  }
  if (log_ != nullptr) note(instruction, lanes, true, true, true);
  MemoryWatch::instance().changed({lanes.low, lanes.high});
}

}  // namespace vnpu::triton
