// Many synchronous copies in one call.

#include <optional>
#include <string>

#include "abi/ascendcl/declarations.h"
#include "device/memory.h"

using namespace vnpu;
using abi::guarded;

namespace {

constexpr char kName[] = "aclrtMemcpyBatch";

[[noreturn]] void refuse(const std::string& what) {
  throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: ") + kName + " " + what);
}

// Each attribute applies to the copies from its index up to the index of the next attribute.
// Source: hicann/runtime docs/zh/api_ref/11-03, aclrtMemcpyBatch.
void check_indexes(const size_t* indexes, size_t attributes, size_t copies) {
  if (copies == 0 || attributes == 0 || attributes > copies || indexes[0] != 0 ||
      indexes[attributes - 1] >= copies) {
    refuse(
        "has " + std::to_string(attributes) + " attributes for " + std::to_string(copies) +
        " copies: give one or more copies, no more attributes than copies, the first from 0 on.");
  }
  for (size_t i = 1; i < attributes; ++i) {
    if (indexes[i] <= indexes[i - 1]) {
      refuse("has attribute " + std::to_string(i) + " begin at copy " + std::to_string(indexes[i]) +
             ", no later than the one before: give them in ascending order.");
    }
  }
}

bool is_device(const aclrtMemLocation& location) {
  return location.type == ACL_MEM_LOCATION_TYPE_DEVICE;
}

// The attribute must match the memory's location, and all copies must have the same direction: to
// the device, or from it.
void check_place(const void* to, const void* from, const aclrtMemcpyBatchAttr& attribute,
                 std::optional<bool>& to_device) {
  const Memory& memory = Memory::instance();
  const bool at_to = memory.is_device_address(to);
  const bool at_from = memory.is_device_address(from);
  if (is_device(attribute.dstLoc) != at_to || is_device(attribute.srcLoc) != at_from) {
    refuse("has attributes that do not fit the addresses: from " + memory.describe(from) + ", to " +
           memory.describe(to) + ".");
  }
  if (at_to == at_from || to_device.value_or(at_to) != at_to) {
    refuse(
        "takes copies from host to device, or copies from device to host, and only one of both "
        "in a call.");
  }
  to_device = at_to;
}

}  // namespace

VNPU_ACL(aclrtMemcpyBatch, (void** to, size_t* rooms, void** from, size_t* sizes, size_t count,
                            aclrtMemcpyBatchAttr* attributes, size_t* indexes,
                            size_t attribute_count, size_t* failed)) {
  if (failed != nullptr) *failed = ~size_t{0};
  size_t at = 0;
  const int refused = guarded(kName, [&] {
    if (attributes == nullptr || indexes == nullptr) refuse("has no attributes.");
    check_indexes(indexes, attribute_count, count);
    std::optional<bool> to_device;
    for (size_t attribute = 0; at < count; ++at) {
      if (attribute + 1 < attribute_count && indexes[attribute + 1] == at) ++attribute;
      if (failed != nullptr) *failed = at;
      check_place(to[at], from[at], attributes[attribute], to_device);
    }
    if (failed != nullptr) *failed = ~size_t{0};
  });
  if (refused != 0) return refused;
  for (size_t i = 0; i < count; ++i) {
    if (const int status = aclrtMemcpy(to[i], rooms[i], from[i], sizes[i], ACL_MEMCPY_DEFAULT)) {
      return status;
    }
  }
  return 0;
}
