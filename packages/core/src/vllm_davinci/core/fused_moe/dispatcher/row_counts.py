"""Row counts of an all-to-all on their way to the host, which waits no longer than told."""

import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch_npu
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core import components
from vllm_davinci.core.errors import DeviceError

# Of the host's wait, where --distributed-timeout-seconds says nothing. The executor gives up a step
# after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, 300 unless set, and could not say what was waited for.
COUNTS_LIMIT = timedelta(seconds=240)
POLL_S = 50e-6


@dataclass(frozen=True)
class CountsWait:
    """One layer's wait of the host for row counts.

    layer:       its name, for the error when the wait takes longer than limit
    is_computed: whether there are counts to wait for. Where a device only models time, each rank
                 has an equal part of the rows
    """

    layer: str
    limit: timedelta = COUNTS_LIMIT
    is_computed: bool = True

    @classmethod
    def of_layer(cls, layer: str, vllm_config: VllmConfig) -> "CountsWait":
        """With the limit that the engine's options give to its groups, if they give one."""
        seconds = vllm_config.parallel_config.distributed_timeout_seconds
        limit = COUNTS_LIMIT if seconds is None else timedelta(seconds=seconds)
        return cls(layer, limit, components.device_computes())


class RowCounts:
    """Rows to and from each rank, on their way to the host."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, num_rows: int) -> None:
        """sent, received: [world_size, num_local], int64, on the device; num_rows: sent in all."""
        self._num_rows = num_rows
        sums = torch.stack((sent.sum(1), received.sum(1)))
        self._on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._on_host.copy_(sums, non_blocking=True)
        self._arrival = torch_npu.npu.Event()
        self._arrival.record()

    def wait(self, wait: CountsWait, group: GroupCoordinator) -> tuple[list[int], list[int]]:
        """Rows for each rank of the group, and rows from each. Raises DeviceError at the limit."""
        deadline = time.monotonic() + wait.limit.total_seconds()
        while not self._arrival.query():
            if time.monotonic() > deadline:
                name = group.unique_name.split(":")[0]
                raise DeviceError(
                    f"{wait.layer}: rank {group.rank_in_group} of group {name!r} waited "
                    f"{wait.limit.total_seconds():g} s for the row counts that the "
                    f"{group.world_size} ranks of the group send each other. One of them has "
                    "failed or is late: look for its error in the log above. A longer wait: "
                    "--distributed-timeout-seconds."
                )
            time.sleep(POLL_S)
        self._arrival.synchronize()  # raises what the device has found
        if not wait.is_computed:
            num_ranks = group.world_size
            ends = [self._num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
            parts = [end - begin for begin, end in pairwise(ends)]
            return parts, parts
        sent, received = self._on_host.tolist()
        return sent, received
