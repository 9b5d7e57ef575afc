// Queues of data, which threads of a process exchange. Source: hicann/runtime docs/zh/api_ref/17-02
// and 25-03. Absent are shared buffers and grants to other processes, which these chips do not
// have.

#include <algorithm>
#include <cstring>

#include "abi/acl_tdt_queue/copied_parameter.h"
#include "abi/ascendcl/declarations.h"
#include "acl/acl_tdt_queue.h"
#include "device/memory.h"

using namespace vnpu;
using namespace vnpu::abi;

// Opaque in acl_tdt_queue.h.
struct tagMemQueueAttr {
  char name[kMostNameBytes + 1] = {};
  uint32_t depth = 8;  // where nobody says: src/acl/acl_tdt_queue/queue_process.cpp
};

namespace {

constexpr size_t kMostUserBytes = 96;

// The parts of a message.
constexpr size_t kData = 0;
constexpr size_t kUserData = 1;

std::string bytes_at(const void* address, size_t bytes) {
  const Memory& memory = Memory::instance();
  if (memory.is_device_address(address)) memory.check(address, bytes, "data of a queue");
  return {memory.backing(static_cast<const char*>(address)), bytes};
}

void put(const std::string& data, void* to) {
  const Memory& memory = Memory::instance();
  if (memory.is_device_address(to)) memory.check(to, data.size(), "room for data of a queue");
  std::ranges::copy(data, memory.backing(static_cast<char*>(to)));
}

void check_user_data(const void* data, size_t bytes) {
  require_parameter((data == nullptr) == (bytes == 0) && bytes <= kMostUserBytes,
                    "data of the user's has at most " + std::to_string(kMostUserBytes) +
                        " bytes, and none where there is none; here are " + std::to_string(bytes) +
                        ".");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) acltdtQueueAttr* acltdtCreateQueueAttr() {
  return new acltdtQueueAttr();
}
VNPU_ACL(acltdtDestroyQueueAttr, (const acltdtQueueAttr* attributes)) {
  return guarded("acltdtDestroyQueueAttr", [&] {
    require_parameter(attributes != nullptr, "no attributes are given.");
    delete attributes;
  });
}
VNPU_ACL(acltdtSetQueueAttr, (acltdtQueueAttr * attributes, acltdtQueueAttrType type, size_t bytes,
                              const void* value)) {
  return guarded("acltdtSetQueueAttr", [&] {
    require_parameter(attributes != nullptr, "no attributes are given.");
    if (type == ACL_TDT_QUEUE_DEPTH_UINT32) {
      read_parameter(value, bytes, attributes->depth, "a queue's depth");
      return;
    }
    require_parameter(type == ACL_TDT_QUEUE_NAME_PTR, "a queue has no attribute " +
                                                          std::to_string(type) +
                                                          "; its name (0) and its depth (1) are.");
    const char* name = nullptr;
    read_parameter(value, bytes, name, "the address of a queue's name");
    require_parameter(name != nullptr && std::strlen(name) <= kMostNameBytes,
                      "a queue's name has at most " + std::to_string(kMostNameBytes) + " bytes.");
    std::strcpy(attributes->name, name);
  });
}
VNPU_ACL(acltdtGetQueueAttr, (const acltdtQueueAttr* attributes, acltdtQueueAttrType type,
                              size_t room, size_t* bytes, void* value)) {
  return guarded("acltdtGetQueueAttr", [&] {
    require_parameter(attributes != nullptr, "no attributes are given.");
    if (type == ACL_TDT_QUEUE_DEPTH_UINT32) {
      write_parameter(attributes->depth, value, room, bytes, "a queue's depth");
      return;
    }
    require_parameter(type == ACL_TDT_QUEUE_NAME_PTR, "a queue has no attribute " +
                                                          std::to_string(type) +
                                                          "; its name (0) and its depth (1) are.");
    const char* const name = attributes->name;
    write_parameter(name, value, room, bytes, "the address of a queue's name");
  });
}

VNPU_ACL(acltdtCreateQueue, (const acltdtQueueAttr* attributes, uint32_t* id)) {
  return guarded("acltdtCreateQueue", [&] {
    require_parameter(id != nullptr, "there is no place for the queue's number.");
    const int device = System::instance().require_current_device();
    const acltdtQueueAttr usual;
    const acltdtQueueAttr& asked = attributes == nullptr ? usual : *attributes;
    try {
      *id = MessageQueues::instance().create(device, asked.name, asked.depth);
    } catch (const Failure& failure) {
      // Another status than the runtime's. Source: example 1_queue_route, CreateQueue.
      if (failure.kind != FailureKind::kInvalidArgument) throw;
      throw Failure(static_cast<FailureKind>(kInvalidParameter), failure.what());
    }
  });
}
VNPU_ACL(acltdtDestroyQueue, (uint32_t id)) {
  return guarded("acltdtDestroyQueue", [&] {
    try {
      MessageQueues::instance().destroy(id);
    } catch (const Failure& failure) {
      if (failure.kind != FailureKind::kInvalidArgument) throw;
      throw Failure(static_cast<FailureKind>(kFailed), failure.what());
    }
  });
}
VNPU_ACL(acltdtEnqueueData, (uint32_t id, const void* data, size_t bytes, const void* user_data,
                             size_t user_bytes, int32_t timeout_ms, uint32_t)) {
  bool is_done = false;
  const int status = guarded("acltdtEnqueueData", [&] {
    require_parameter(data != nullptr && bytes > 0, "a queue takes no empty data.");
    check_user_data(user_data, user_bytes);
    MessageQueues::Message message;
    message.parts = {bytes_at(data, bytes),
                     user_bytes == 0 ? std::string() : bytes_at(user_data, user_bytes)};
    is_done = MessageQueues::instance().push(id, std::move(message), limit_of(timeout_ms));
  });
  return status_of_wait(status, is_done, kQueueFull);
}
VNPU_ACL(acltdtDequeueData, (uint32_t id, void* data, size_t room, size_t* bytes, void* user_data,
                             size_t user_room, int32_t timeout_ms)) {
  bool is_done = false;
  const int status = guarded("acltdtDequeueData", [&] {
    require_parameter(data != nullptr && bytes != nullptr,
                      "there is no place for a queue's data, or for its size.");
    check_user_data(user_data, user_room);
    const auto take = [&](const MessageQueues::Message& message) {
      const std::string& content = message.parts[kData];
      require_parameter(content.size() <= room, "room for " + std::to_string(room) +
                                                    " bytes of data of " +
                                                    std::to_string(content.size()) + ".");
      put(content, data);
      *bytes = content.size();
      if (user_room > 0) put(message.parts[kUserData].substr(0, user_room), user_data);
    };
    is_done = MessageQueues::instance().pop(id, take, limit_of(timeout_ms));
  });
  return status_of_wait(status, is_done, kQueueEmpty);
}
