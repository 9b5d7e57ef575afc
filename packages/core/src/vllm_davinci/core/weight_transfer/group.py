"""One HCCL group of a trainer's process and all workers of an engine, beside the groups of each."""

from datetime import timedelta

import torch
import torch_npu
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from vllm_davinci.core.config.registered_names import HCCL_ENGINE

SENDER = 0  # the trainer's rank in the group
# How long the trainer and the workers wait for each other to join.
JOIN_LIMIT = timedelta(minutes=5)


class TransferGroup:
    """Ranks of several programs: the trainer is rank 0, the engine's workers follow.

    Joins them; every rank calls it at the same time, each with a device of its own that is set.
    address, port: where the trainer's process listens while they join, and until it ends
    Raises RuntimeError when the others do not come within JOIN_LIMIT.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        # Without a wait for the others: those that come late find the store.
        self._store = TCPStore(
            address,
            port,
            is_master=rank == SENDER,
            timeout=JOIN_LIMIT,
            wait_for_workers=False,
        )
        made = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        store = PrefixStore(HCCL_ENGINE, self._store)
        self._group = made(store, rank, world_size, made.Options())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Sends the trainer's tensor to all, into theirs, in the order of the current stream."""
        options = BroadcastOptions()
        options.rootRank = SENDER
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leaves the group. Nothing may be under way."""
        self._group.shutdown()
