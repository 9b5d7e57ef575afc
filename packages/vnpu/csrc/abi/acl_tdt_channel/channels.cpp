// Channels of tensors: queues of datasets with a name. No operator here sends to one or receives
// from it, as some of a chip's do: what a program sends, it receives itself. Source: hicann/runtime
// docs/zh/api_ref/17-01.

#include <algorithm>
#include <cstring>

#include "abi/acl_tdt_channel/data_set.h"
#include "abi/tdt_statuses.h"

using namespace vnpu;
using namespace vnpu::abi;

// Opaque in acl_tdt.h.
struct acltdtChannelHandle {
  MessageQueues::Id queue;
};

namespace {

void require_channel(const acltdtChannelHandle* channel) {
  require_parameter(channel != nullptr, "no channel is given.");
}

}  // namespace

// Absent is acltdtCreateChannel, without a capacity, which these chips do not have.
extern "C" __attribute__((visibility("default"))) acltdtChannelHandle*
acltdtCreateChannelWithCapacity(uint32_t device, const char* name, size_t capacity) {
  acltdtChannelHandle* channel = nullptr;
  guarded("acltdtCreateChannelWithCapacity", [&] {
    require_parameter(
        name != nullptr && std::strlen(name) <= kMostNameBytes,
        "a channel has a name, of at most " + std::to_string(kMostNameBytes) + " bytes.");
    System::instance().physical(static_cast<int>(device));
    const auto depth =
        static_cast<uint32_t>(std::min<size_t>(capacity, size_t{MessageQueues::kMostDepth} + 1));
    channel = new acltdtChannelHandle{
        MessageQueues::instance().create(static_cast<int>(device), name, depth)};
  });
  return channel;
}
VNPU_ACL(acltdtStopChannel, (acltdtChannelHandle * channel)) {
  return guarded("acltdtStopChannel", [&] {
    require_channel(channel);
    MessageQueues::instance().stop(channel->queue);
  });
}
VNPU_ACL(acltdtDestroyChannel, (acltdtChannelHandle * channel)) {
  return guarded("acltdtDestroyChannel", [&] {
    require_channel(channel);
    MessageQueues::instance().destroy(channel->queue);
    delete channel;
  });
}
VNPU_ACL(acltdtCleanChannel, (acltdtChannelHandle * channel)) {
  return guarded("acltdtCleanChannel", [&] {
    require_channel(channel);
    MessageQueues::instance().clear(channel->queue);
  });
}
VNPU_ACL(acltdtQueryChannelSize, (const acltdtChannelHandle* channel, size_t* size)) {
  return guarded("acltdtQueryChannelSize", [&] {
    require_channel(channel);
    require_parameter(size != nullptr, "there is no place for the number of messages.");
    *size = MessageQueues::instance().size(channel->queue);
  });
}
VNPU_ACL(acltdtSendTensor,
         (const acltdtChannelHandle* channel, const acltdtDataset* dataset, int32_t timeout_ms)) {
  bool is_sent = false;
  const int status = guarded("acltdtSendTensor", [&] {
    require_channel(channel);
    require_parameter(dataset != nullptr, "no dataset is given.");
    is_sent =
        MessageQueues::instance().push(channel->queue, message_of(*dataset), limit_of(timeout_ms));
  });
  return status_of_wait(status, is_sent, kQueueFull);
}
VNPU_ACL(acltdtReceiveTensor,
         (const acltdtChannelHandle* channel, acltdtDataset* dataset, int32_t timeout_ms)) {
  bool is_received = false;
  const int status = guarded("acltdtReceiveTensor", [&] {
    require_channel(channel);
    require_parameter(dataset != nullptr, "no dataset is given.");
    require_parameter(dataset->items.size() == dataset->received.size(),
                      "a dataset that receives has no items of the program's.");
    const auto take = [&](const MessageQueues::Message& message) { receive(message, *dataset); };
    is_received = MessageQueues::instance().pop(channel->queue, take, limit_of(timeout_ms));
  });
  return status_of_wait(status, is_received, kQueueEmpty);
}
