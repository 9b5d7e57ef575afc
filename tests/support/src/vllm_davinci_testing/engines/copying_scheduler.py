"""A scheduler that gives requests copies of shared cached blocks."""

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class CopyingScheduler(Scheduler):
    """Selected by vLLM's option scheduler_cls, with asynchronous scheduling off.

    vLLM copies a block on write if a cached prefix ends inside it, which happens only in models
    with recurrent layers. Here the first block of every request that hits the cache is copied, and
    the request reads the copy.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        copies = []
        for request in output.scheduled_new_reqs:
            if request.num_computed_tokens == 0:
                continue
            (manager,) = self.kv_cache_manager.coordinator.single_type_managers
            blocks = manager.req_to_blocks[request.req_id]
            shared, (copy,) = blocks[0], manager.block_pool.get_new_blocks(1)
            blocks[0] = copy
            request.block_ids[0][0] = copy.block_id
            copies.append(KVCacheBlockCopy(shared.block_id, copy.block_id))
        output.kv_cache_block_copies = copies or None
        return output
