#pragma once

#include <cstdint>
#include <vector>

#include "collective/element.h"
#include "collective/group.h"
#include "collective/partition.h"
#include "device/task.h"

// The collectives, as tasks for a stream. Buffers are device addresses; counts are in elements; an
// output may be the input (or the part of it that belongs there). All ranks get identical results.
// Each checks its buffers when it is made and throws kIllegalAddress, kInvalidArgument.
namespace vnpu {

// receive = reduction over ranks of send; [count] both.
TaskPtr all_reduce(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                   ElementType type, Reduction reduction);
// Writes the result on `root` only; other ranks' `receive` is unchanged.
TaskPtr reduce_to(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                  ElementType type, Reduction reduction, uint32_t root);
// receive's part r = rank r's send [count].
TaskPtr all_gather(const GroupPtr& group, const void* send, uint64_t count, void* receive,
                   ElementType type);
TaskPtr all_gather_v(const GroupPtr& group, const void* send, uint64_t count, void* receive,
                     Partition receive_parts, ElementType type);
// receive [count] = reduction over ranks of this rank's part of send.
TaskPtr reduce_scatter(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                       ElementType type, Reduction reduction);
TaskPtr reduce_scatter_v(const GroupPtr& group, const void* send, Partition send_parts,
                         void* receive, uint64_t count, ElementType type, Reduction reduction);
// buffer [count] = root's.
TaskPtr broadcast(const GroupPtr& group, void* buffer, uint64_t count, ElementType type,
                  uint32_t root);
// receive [count] = this rank's part of root's send.
TaskPtr scatter(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                ElementType type, uint32_t root);
// receive's part r = this rank's part of rank r's send; `count` per pair of ranks.
TaskPtr all_to_all(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                   ElementType type);
TaskPtr all_to_all_v(const GroupPtr& group, const void* send, Partition send_parts,
                     ElementType send_type, void* receive, Partition receive_parts,
                     ElementType receive_type);
TaskPtr barrier(const GroupPtr& group);

}  // namespace vnpu
