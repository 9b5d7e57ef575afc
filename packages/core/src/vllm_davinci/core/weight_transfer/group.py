"""One HCCL group of a trainer's process and an engine's workers, next to their own groups."""

from datetime import timedelta

import torch
import torch_npu
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from vllm_davinci.core.config.registered_names import HCCL_ENGINE

SENDER = 0  # the trainer's rank in the group
# Timeout of the trainer and the workers for joining.
JOIN_LIMIT = timedelta(minutes=5)


class TransferGroup:
    """Ranks of several programs: the trainer is rank 0, the engine's workers follow.

    The constructor joins the group; every rank calls it at the same time, with its own device set.
    address, port: where the trainer's process listens until it ends
    Raises RuntimeError if the others do not join within JOIN_LIMIT.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        # Does not wait for the others: late ranks find the store.
        self._store = TCPStore(
            address, port, is_master=rank == SENDER, timeout=JOIN_LIMIT, wait_for_workers=False
        )
        made = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        store = PrefixStore(HCCL_ENGINE, self._store)
        self._group = made(store, rank, world_size, made.Options())

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcasts the trainer's tensor into all ranks' tensors, on the current stream."""
        options = BroadcastOptions()
        options.rootRank = SENDER
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leaves the group. No transfer may be active."""
        self._group.shutdown()
