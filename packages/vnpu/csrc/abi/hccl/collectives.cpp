// Collectives. Arrays of counts and displacements are host memory that belongs to the caller: they
// are copied before the call returns.

#include "abi/hccl/communicator.h"
#include "collective/operations.h"
#include "collective/servers.h"
#include "device/checked_sizes.h"

using namespace vnpu;
using namespace vnpu::abi;

namespace {

Partition partition(const Group& group, const void* counts, const void* displacements) {
  const auto* first_count = static_cast<const uint64_t*>(counts);
  const auto* first_offset = static_cast<const uint64_t*>(displacements);
  return Partition{{first_count, first_count + group.ranks()},
                   {first_offset, first_offset + group.ranks()}};
}

}  // namespace

VNPU_HCCL(HcclResult, HcclAllReduce,
          (void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
           HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclAllReduce", [&] {
    submit(stream, all_reduce(group_of(communicator), send, receive, count, element_type(type),
                              reduction(operation)));
  });
}

VNPU_HCCL(HcclResult, HcclReduce,
          (void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
           uint32_t root, HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclReduce", [&] {
    submit(stream, reduce_to(group_of(communicator), send, receive, count, element_type(type),
                             reduction(operation), root));
  });
}

VNPU_HCCL(HcclResult, HcclBroadcast,
          (void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclBroadcast", [&] {
    submit(stream, broadcast(group_of(communicator), buffer, count, element_type(type), root));
  });
}

VNPU_HCCL(HcclResult, HcclAllGather,
          (void* send, void* receive, uint64_t count, HcclDataType type, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclAllGather", [&] {
    submit(stream, all_gather(group_of(communicator), send, count, receive, element_type(type)));
  });
}

VNPU_HCCL(HcclResult, HcclAllGatherV,
          (void* send, uint64_t count, void* receive, const void* receive_counts,
           const void* receive_displacements, HcclDataType type, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclAllGatherV", [&] {
    const GroupPtr group = group_of(communicator);
    require_servers_for_unequal_parts(*group, "HcclAllGatherV");
    submit(stream, all_gather_v(group, send, count, receive,
                                partition(*group, receive_counts, receive_displacements),
                                element_type(type)));
  });
}

VNPU_HCCL(HcclResult, HcclReduceScatter,
          (void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
           HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclReduceScatter", [&] {
    submit(stream, reduce_scatter(group_of(communicator), send, receive, count, element_type(type),
                                  reduction(operation)));
  });
}

VNPU_HCCL(HcclResult, HcclReduceScatterV,
          (void* send, const void* send_counts, const void* send_displacements, void* receive,
           uint64_t count, HcclDataType type, HcclReduceOp operation, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclReduceScatterV", [&] {
    const GroupPtr group = group_of(communicator);
    require_servers_for_unequal_parts(*group, "HcclReduceScatterV");
    submit(stream, reduce_scatter_v(group, send, partition(*group, send_counts, send_displacements),
                                    receive, count, element_type(type), reduction(operation)));
  });
}

VNPU_HCCL(HcclResult, HcclScatter,
          (void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root,
           HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclScatter", [&] {
    submit(stream, scatter(group_of(communicator), send, receive, count, element_type(type), root));
  });
}

VNPU_HCCL(HcclResult, HcclAlltoAll,
          (const void* send, uint64_t send_count, HcclDataType send_type, const void* receive,
           uint64_t receive_count, HcclDataType receive_type, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclAlltoAll", [&] {
    const ElementType type = element_type(send_type);
    const auto bytes = [](uint64_t count, ElementType of) {
      return checked_multiply<uint64_t>(count, size_of(of), "the size of an all_to_all's part");
    };
    if (bytes(send_count, type) != bytes(receive_count, element_type(receive_type))) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: all_to_all sends " + std::to_string(send_count) + " x " + name_of(type) +
                        " to each rank but receives " + std::to_string(receive_count) + " x " +
                        name_of(element_type(receive_type)) +
                        " from each; both must have the "
                        "same size.");
    }
    submit(stream,
           all_to_all(group_of(communicator), send, const_cast<void*>(receive), send_count, type));
  });
}

VNPU_HCCL(HcclResult, HcclAlltoAllV,
          (const void* send, const void* send_counts, const void* send_displacements,
           HcclDataType send_type, const void* receive, const void* receive_counts,
           const void* receive_displacements, HcclDataType receive_type, HcclComm communicator,
           aclrtStream stream)) {
  return hccl_guarded("HcclAlltoAllV", [&] {
    const GroupPtr group = group_of(communicator);
    submit(stream, all_to_all_v(group, send, partition(*group, send_counts, send_displacements),
                                element_type(send_type), const_cast<void*>(receive),
                                partition(*group, receive_counts, receive_displacements),
                                element_type(receive_type)));
  });
}

VNPU_HCCL(HcclResult, HcclBarrier, (HcclComm communicator, aclrtStream stream)) {
  return hccl_guarded("HcclBarrier", [&] { submit(stream, barrier(group_of(communicator))); });
}
