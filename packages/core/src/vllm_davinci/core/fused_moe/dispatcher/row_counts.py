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

    layer: its name, for the error when the wait takes longer than limit
    """

    layer: str
    limit: timedelta = COUNTS_LIMIT

    @classmethod
    def of_layer(cls, layer: str, vllm_config: VllmConfig) -> "CountsWait":
        """With the limit that the engine's options give to its groups, if they give one."""
        seconds = vllm_config.parallel_config.distributed_timeout_seconds
        return cls(layer) if seconds is None else cls(layer, timedelta(seconds=seconds))


class RowCounts:
    """Rows to and from each rank, on their way to the host.

    Where nothing is computed, for a model of time, each rank has an equal part of the rows.
    """

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, num_rows: int) -> None:
        """sent, received: [world_size, num_local], int64, on the device; num_rows: sent in all."""
        ends = [num_rows * rank // sent.shape[0] for rank in range(sent.shape[0] + 1)]
        balanced = [end - begin for begin, end in pairwise(ends)]
        self._stand_in = None if components.device_computes() else balanced
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
        if self._stand_in is not None:
            return self._stand_in, self._stand_in
        sent, received = self._on_host.tolist()
        return sent, received
