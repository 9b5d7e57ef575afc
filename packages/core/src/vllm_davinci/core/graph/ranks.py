"""Values on which an engine's ranks agree before capture."""

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group


def least_of_all_ranks(value: int) -> int:
    """The smallest value on any rank of this engine."""
    world = get_world_group()
    if world.world_size == 1:
        return value
    least = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=world.cpu_group)
    return int(least)
