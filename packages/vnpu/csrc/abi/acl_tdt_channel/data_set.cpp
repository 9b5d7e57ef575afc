// Tensors that travel through channels. Source: hicann/runtime docs/zh/api_ref/25-03,
// acltdtDataItem and acltdtDataset; for refusals src/acl/acl_tdt_channel.

#include "abi/acl_tdt_channel/data_set.h"

#include <algorithm>
#include <cstring>

#include "abi/tdt_statuses.h"
#include "device/memory.h"

using namespace vnpu;
using namespace vnpu::abi;

namespace {

constexpr size_t kMostDims = 128;

// Before an item's dims in its message.
struct Header {
  acltdtTensorType type;
  aclDataType data_type;
};

void check_dims(const int64_t* dims, size_t count) {
  require_parameter((dims == nullptr) == (count == 0),
                    "dims of a tensor and their number (" + std::to_string(count) +
                        ") do not fit: one of both says that there are none.");
}

bool is_on_device(const acltdtDataItem& item) {
  return Memory::instance().is_device_address(item.data);
}

}  // namespace

MessageQueues::Message vnpu::abi::message_of(const acltdtDataset& dataset) {
  MessageQueues::Message message;
  for (const acltdtDataItem* item : dataset.items) {
    const Header header{item->type, item->data_type};
    std::string head(reinterpret_cast<const char*>(&header), sizeof(header));
    head.append(reinterpret_cast<const char*>(item->dims.data()),
                item->dims.size() * sizeof(int64_t));
    message.parts.push_back(std::move(head));
    const Memory& memory = Memory::instance();
    if (is_on_device(*item)) memory.check(item->data, item->bytes, "a tensor that is sent");
    const char* const bytes = memory.backing(static_cast<const char*>(item->data));
    message.parts.push_back(bytes == nullptr ? std::string() : std::string(bytes, item->bytes));
  }
  return message;
}

void vnpu::abi::receive(const MessageQueues::Message& message, acltdtDataset& dataset) {
  dataset.items.clear();
  dataset.received.clear();
  for (size_t i = 0; i + 1 < message.parts.size(); i += 2) {
    const std::string& head = message.parts[i];
    Header header{};
    std::memcpy(&header, head.data(), sizeof(header));
    auto item = std::make_unique<acltdtDataItem>(acltdtDataItem{
        header.type, std::vector<int64_t>((head.size() - sizeof(header)) / sizeof(int64_t)),
        header.data_type, nullptr, message.parts[i + 1].size(), message.parts[i + 1]});
    std::memcpy(item->dims.data(), head.data() + sizeof(header), head.size() - sizeof(header));
    if (item->bytes > 0) item->data = item->own.data();
    dataset.items.push_back(item.get());
    dataset.received.push_back(std::move(item));
  }
}

#define VNPU_TDT(RESULT, NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) RESULT NAME PARAMETERS

VNPU_TDT(acltdtDataItem*, acltdtCreateDataItem,
         (acltdtTensorType type, const int64_t* dims, size_t dims_count, aclDataType data_type,
          void* data, size_t bytes)) {
  acltdtDataItem* item = nullptr;
  guarded("acltdtCreateDataItem", [&] {
    check_dims(dims, dims_count);
    require_parameter(dims_count <= kMostDims, "a tensor of " + std::to_string(dims_count) +
                                                   " dims; at most " + std::to_string(kMostDims) +
                                                   " are allowed.");
    const bool is_tensor = type == ACL_TENSOR_DATA_TENSOR;
    require_parameter(is_tensor || dims == nullptr,
                      "only a tensor has dims: what marks an end, or is no tensor, has none.");
    item = is_tensor ? new acltdtDataItem{type, {dims, dims + dims_count}, data_type, data, bytes}
                     : new acltdtDataItem{type, {}, ACL_DT_UNDEFINED, nullptr, 0};
  });
  return item;
}
VNPU_ACL(acltdtDestroyDataItem, (acltdtDataItem * item)) {
  return guarded("acltdtDestroyDataItem", [&] {
    require_parameter(item != nullptr, "no item is given.");
    delete item;
  });
}
VNPU_TDT(acltdtTensorType, acltdtGetTensorTypeFromItem, (const acltdtDataItem* item)) {
  return item == nullptr ? ACL_TENSOR_DATA_UNDEFINED : item->type;
}
VNPU_TDT(aclDataType, acltdtGetDataTypeFromItem, (const acltdtDataItem* item)) {
  return item == nullptr ? ACL_DT_UNDEFINED : item->data_type;
}
VNPU_TDT(void*, acltdtGetDataAddrFromItem, (const acltdtDataItem* item)) {
  return item == nullptr ? nullptr : item->data;
}
VNPU_TDT(size_t, acltdtGetDataSizeFromItem, (const acltdtDataItem* item)) {
  return item == nullptr ? 0 : item->bytes;
}
VNPU_TDT(size_t, acltdtGetDimNumFromItem, (const acltdtDataItem* item)) {
  return item == nullptr ? 0 : item->dims.size();
}
VNPU_ACL(acltdtGetDimsFromItem, (const acltdtDataItem* item, int64_t* dims, size_t count)) {
  return guarded("acltdtGetDimsFromItem", [&] {
    require_parameter(item != nullptr, "no item is given.");
    check_dims(dims, count);
    require_parameter(count >= item->dims.size(), "room for " + std::to_string(count) +
                                                      " dims of a tensor that has " +
                                                      std::to_string(item->dims.size()) + ".");
    std::ranges::copy(item->dims, dims);
  });
}
// No tensor here is sent in slices: it is the first of none.
VNPU_ACL(acltdtGetSliceInfoFromItem, (const acltdtDataItem* item, size_t* count, size_t* index)) {
  return guarded("acltdtGetSliceInfoFromItem", [&] {
    require_parameter(item != nullptr && count != nullptr && index != nullptr,
                      "an item, or a place for an answer, is missing.");
    *count = *index = 0;
  });
}

VNPU_TDT(acltdtDataset*, acltdtCreateDataset, ()) { return new acltdtDataset(); }
VNPU_ACL(acltdtDestroyDataset, (acltdtDataset * dataset)) {
  return guarded("acltdtDestroyDataset", [&] {
    require_parameter(dataset != nullptr, "no dataset is given.");
    delete dataset;
  });
}
VNPU_ACL(acltdtAddDataItem, (acltdtDataset * dataset, acltdtDataItem* item)) {
  return guarded("acltdtAddDataItem", [&] {
    require_parameter(dataset != nullptr && item != nullptr, "a dataset, or its item, is missing.");
    if (!dataset->received.empty()) {
      throw Failure(static_cast<FailureKind>(kFeatureUnsupported),
                    "vnpu: a dataset that was received takes no items; create one to send.");
    }
    const auto lies_elsewhere = [&](const acltdtDataItem* other) {
      return other->data != nullptr && is_on_device(*other) != is_on_device(*item);
    };
    require_parameter(item->data == nullptr || std::ranges::none_of(dataset->items, lies_elsewhere),
                      "the tensors of a dataset lie all on the host, or all on a device.");
    dataset->items.push_back(item);
  });
}
VNPU_TDT(acltdtDataItem*, acltdtGetDataItem, (const acltdtDataset* dataset, size_t index)) {
  acltdtDataItem* item = nullptr;
  guarded("acltdtGetDataItem", [&] {
    require_parameter(dataset != nullptr, "no dataset is given.");
    require_parameter(index < dataset->items.size(), "item " + std::to_string(index) +
                                                         " of a dataset of " +
                                                         std::to_string(dataset->items.size()));
    item = dataset->items[index];
  });
  return item;
}
VNPU_TDT(size_t, acltdtGetDatasetSize, (const acltdtDataset* dataset)) {
  return dataset == nullptr ? 0 : dataset->items.size();
}
VNPU_TDT(const char*, acltdtGetDatasetName, (const acltdtDataset* dataset)) {
  return dataset == nullptr ? nullptr : dataset->name.c_str();
}
