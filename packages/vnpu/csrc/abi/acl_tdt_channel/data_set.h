#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "acl/acl_tdt.h"
#include "device/message_queues.h"

// Opaque in acl_tdt.h.
struct acltdtDataItem {
  acltdtTensorType type;
  std::vector<int64_t> dims;
  aclDataType data_type;
  void* data;
  size_t bytes;
  std::string own = {};  // behind `data`, of one that was received
};

struct acltdtDataset {
  std::vector<acltdtDataItem*> items;                          // as the program sees them
  std::vector<std::unique_ptr<acltdtDataItem>> received = {};  // those that are the dataset's own
  std::string name = {};
};

namespace vnpu::abi {

// A dataset as a message, with its data, wherever that is. Throws kIllegalAddress.
MessageQueues::Message message_of(const acltdtDataset& dataset);
// Replaces what was received before.
void receive(const MessageQueues::Message& message, acltdtDataset& dataset);

}  // namespace vnpu::abi
