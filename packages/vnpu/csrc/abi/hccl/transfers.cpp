// Messages between two ranks.

#include "collective/transfers.h"
#include "abi/hccl/communicator.h"

using namespace vnpu;
using namespace vnpu::abi;
using Direction = Transfer::Direction;

VNPU_HCCL(HcclResult, HcclSend,
          (void* buffer, uint64_t count, HcclDataType type, uint32_t destination,
           HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclSend", [&] {
    const Transfer transfer{Direction::kSend, buffer, count, element_type(type), destination};
    submit(stream, std::make_shared<Transfers>(group_of(communicator), "send",
                                               std::vector<Transfer>{transfer}));
  });
}

VNPU_HCCL(HcclResult, HcclRecv,
          (void* buffer, uint64_t count, HcclDataType type, uint32_t source, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclRecv", [&] {
    const Transfer transfer{Direction::kReceive, buffer, count, element_type(type), source};
    submit(stream, std::make_shared<Transfers>(group_of(communicator), "receive",
                                               std::vector<Transfer>{transfer}));
  });
}

VNPU_HCCL(HcclResult, HcclBatchSendRecv,
          (HcclSendRecvItem * items, uint32_t count, HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclBatchSendRecv", [&] {
    std::vector<Transfer> transfers;
    for (uint32_t i = 0; i < count; ++i) {
      const HcclSendRecvItem& item = items[i];
      if (item.sendRecvType != HCCL_SEND && item.sendRecvType != HCCL_RECV) {
        throw Failure(FailureKind::kInvalidArgument, "vnpu: item " + std::to_string(i) +
                                                         " of HcclBatchSendRecv is neither a send "
                                                         "nor a receive: " +
                                                         std::to_string(item.sendRecvType) + ".");
      }
      transfers.push_back({item.sendRecvType == HCCL_SEND ? Direction::kSend : Direction::kReceive,
                           item.buf, item.count, element_type(item.dataType), item.remoteRank});
    }
    submit(stream,
           std::make_shared<Transfers>(group_of(communicator), "batch_send_recv", transfers));
  });
}
