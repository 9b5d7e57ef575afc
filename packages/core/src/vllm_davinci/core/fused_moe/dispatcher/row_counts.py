"""Copies the row counts of an all-to-all to the host, which waits with a timeout."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
import torch_npu
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core import components
from vllm_davinci.core.config.time_limits import LONGER_WAIT, StepLimits
from vllm_davinci.core.errors import DeviceError

POLL_S = 50e-6


@dataclass(frozen=True)
class CountsWait:
    """One layer's host wait for row counts.

    layer:       its name, for the timeout error
    is_computed: False on a device that only models time: it has no counts, and each rank gets an
                 equal part of the rows
    """

    layer: str
    limit: timedelta = field(default_factory=lambda: StepLimits.of_environment().row_counts)
    is_computed: bool = field(default_factory=components.device_computes)


class RowCounts:
    """Rows to and from each rank, being copied to the host."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, num_rows: int) -> None:
        """sent, received: [world_size, num_local], int64, on the device; num_rows: rows sent"""
        self._num_rows = num_rows
        sums = torch.stack((sent.sum(1), received.sum(1)))
        self._on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._on_host.copy_(sums, non_blocking=True)
        self._arrival = torch_npu.npu.Event()
        self._arrival.record()

    def wait(self, wait: CountsWait, group: GroupCoordinator) -> tuple[list[int], list[int]]:
        """Rows for each rank of the group, and rows from each rank. Raises DeviceError on
        timeout."""
        deadline = time.monotonic() + wait.limit.total_seconds()
        while not self._arrival.query():
            if time.monotonic() > deadline:
                name = group.unique_name.split(":")[0]
                raise DeviceError(
                    f"{wait.layer}: rank {group.rank_in_group} of group {name!r} timed out after "
                    f"{wait.limit.total_seconds():g} s waiting for the row counts of the "
                    f"{group.world_size} ranks of the group. One of them has failed or is late: "
                    f"look for its error in the log above. {LONGER_WAIT}"
                )
            time.sleep(POLL_S)
        self._arrival.synchronize()  # raises the device's error
        if not wait.is_computed:
            num_ranks = group.world_size
            ends = [self._num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
            parts = [end - begin for begin, end in pairwise(ends)]
            return parts, parts
        sent, received = self._on_host.tolist()
        return sent, received
