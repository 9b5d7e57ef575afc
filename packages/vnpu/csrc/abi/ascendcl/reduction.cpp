// Sums, maxima and minima of device memory, which the copy engine makes on the way.

#include "collective/reduction.h"

#include <array>

#include "abi/ascendcl/declarations.h"
#include "device/configuration.h"
#include "device/system.h"

using namespace vnpu;
using abi::guarded;

namespace {

class Combine final : public Task {
 public:
  Combine(void* to, const void* from, size_t bytes, ElementType type, Reduction reduction)
      : Task("reduction"), to_(to), from_(from), bytes_(bytes), type_(type), reduction_(reduction) {
    const auto read = reinterpret_cast<uintptr_t>(from);
    const auto written = reinterpret_cast<uintptr_t>(to);
    touched.add({read, read + bytes, false});
    touched.add({written, written + bytes, true});
  }
  Progress advance() override {
    if (Configuration::instance().compute) {
      const Memory& memory = Memory::instance();
      std::byte* const to = memory.backing(static_cast<std::byte*>(to_));
      const std::array<const std::byte*, 2> inputs{
          to, memory.backing(static_cast<const std::byte*>(from_))};
      reduce(type_, reduction_, inputs, to, bytes_ / size_of(type_));
    }
    return Progress::kDone;
  }

 private:
  void* to_;
  const void* from_;
  size_t bytes_;
  ElementType type_;
  Reduction reduction_;
};

// Source: hicann/runtime docs/zh/api_ref/12_execution_control.md, aclrtReduceAsync, constraints.
ElementType element_of(aclDataType type) {
  switch (type) {
    case ACL_INT8: return ElementType::kInt8;
    case ACL_INT16: return ElementType::kInt16;
    case ACL_INT32: return ElementType::kInt32;
    case ACL_FLOAT16: return ElementType::kFloat16;
    case ACL_BF16: return ElementType::kBfloat16;
    case ACL_FLOAT: return ElementType::kFloat32;
    default: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: aclrtReduceAsync takes int8, int16, int32, float16, bfloat16 and float32, "
                "not data type " +
                    std::to_string(type) + ".");
}

Reduction reduction_of(aclrtReduceKind kind) {
  switch (kind) {
    case ACL_RT_MEMCPY_SDMA_AUTOMATIC_SUM: return Reduction::kSum;
    case ACL_RT_MEMCPY_SDMA_AUTOMATIC_MAX: return Reduction::kMaximum;
    case ACL_RT_MEMCPY_SDMA_AUTOMATIC_MIN: return Reduction::kMinimum;
    default: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: aclrtReduceAsync of kind " + std::to_string(kind) +
                    "; known are sum (10), maximum (11) and minimum (12).");
}

}  // namespace

VNPU_ACL(aclrtReduceAsync, (void* to, const void* from, uint64_t bytes, aclrtReduceKind kind,
                            aclDataType type, aclrtStream stream, void*)) {
  return guarded("aclrtReduceAsync", [&] {
    const ElementType element = element_of(type);
    const Reduction reduction = reduction_of(kind);
    const Memory& memory = Memory::instance();
    memory.check(to, bytes, "the destination of aclrtReduceAsync");
    memory.check(from, bytes, "the source of aclrtReduceAsync");
    if (bytes == 0) return;
    System::instance().executor().submit(
        abi::stream_of(stream), std::make_shared<Combine>(to, from, bytes, element, reduction));
  });
}
