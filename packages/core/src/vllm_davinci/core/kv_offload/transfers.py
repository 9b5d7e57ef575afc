"""Copies KV cache blocks between device and host, with one stream per direction."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from vllm_davinci.core.kv_offload.host_rows import HostRows, Run


class Pairs(NamedTuple):
    """A group of layers, and the row of each of its blocks."""

    regions: list[int]
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass
class Job:
    """A transfer in progress."""

    number: int
    num_bytes: int
    begin: torch_npu.npu.Event
    end: torch_npu.npu.Event


class Direction:
    """Transfers in one direction, which run in sequence on their own stream."""

    def __init__(self, regions: Sequence[torch.Tensor], host: HostRows, to_host: bool) -> None:
        self._regions = regions
        self._host = host
        self._to_host = to_host
        self._stream = torch_npu.npu.Stream()
        self._jobs: deque[Job] = deque()

    def submit(self, number: int, groups: Sequence[Pairs]) -> None:
        """Starts copying after the current stream's work so far: a store reads what that work
        writes, and a load must not be overwritten by its zeroing. Later work on the current stream
        waits for the copy. That work uses other blocks, but operators get the whole cache, so no
        check could prove that accesses are disjoint.
        """
        begin, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch_npu.npu.current_stream())
        num_bytes = 0
        with torch_npu.npu.stream(self._stream):
            begin.record()
            for group in groups:
                for run in self._host.runs(group.blocks, group.rows):
                    num_bytes += sum(self._copy(region, run) for region in group.regions)
            end.record()
        torch_npu.npu.current_stream().wait_event(end)
        self._jobs.append(Job(number, num_bytes, begin, end))

    def _copy(self, region: int, run: Run) -> int:
        host = self._host.parts[run.slab][region][run.row : run.row + run.length]
        device = self._regions[region][run.block : run.block + run.length]
        source, target = (device, host) if self._to_host else (host, device)
        target.copy_(source, non_blocking=True)
        return source.nbytes

    def finished(self) -> list[TransferResult]:
        """Transfers completed since the last call; their bytes are valid."""
        done = []
        while self._jobs and self._jobs[0].end.query():
            job = self._jobs.popleft()
            seconds = job.begin.elapsed_time(job.end) * 1e-3
            done.append(TransferResult(job.number, True, job.num_bytes, seconds))
        return done

    def wait(self, numbers: set[int] | None = None) -> None:
        """Waits for the transfers of these numbers, or for all."""
        for job in self._jobs:
            if numbers is None or job.number in numbers:
                job.end.synchronize()


class HostOffloadingWorker(OffloadingWorker):
    """Stores blocks of the KV cache in pinned host memory, and loads them.

    A host chunk holds `blocks_per_chunk` consecutive blocks of a request.

    caches: regions of the device's cache, int8 [num_blocks, bytes], and the regions of each group
    slabs:  chunks of each slab of the host's memory
    """

    def __init__(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, slabs: Sequence[int]
    ) -> None:
        regions = [part.tensor for part in caches.tensors]
        sizes = [part.page_size_bytes for part in caches.tensors]
        self._groups = [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs]
        self._blocks_per_chunk = blocks_per_chunk
        host = HostRows(sizes, slabs, blocks_per_chunk)
        self._stores = Direction(regions, host, to_host=True)
        self._loads = Direction(regions, host, to_host=False)
        # A step waits for loads, so they do not queue behind stores.
        self._expedited = Direction(regions, host, to_host=False)
        self._directions = (self._stores, self._loads, self._expedited)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._stores.submit(job_id, self._pairs(src_spec, dst_spec))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        direction = self._expedited if expedited else self._loads
        direction.submit(job_id, self._pairs(dst_spec, src_spec))
        return True

    def _pairs(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> list[Pairs]:
        """The rows of each block. Only the first and the last chunk of a group may be partial."""
        assert isinstance(host, BlockIDsLoadStoreSpec)
        pairs, block, chunk = [], 0, 0
        of_chunk = self._blocks_per_chunk
        for regions, count, first in zip(
            self._groups, device.group_sizes, device.block_indices, strict=True
        ):
            if count == 0:
                continue
            skipped = first % of_chunk
            num_chunks = -(-(skipped + count) // of_chunk)
            chunks = host.block_ids[chunk : chunk + num_chunks].astype(np.int64)
            rows = (chunks[:, None] * of_chunk + np.arange(of_chunk)).ravel()
            blocks = device.block_ids[block : block + count].astype(np.int64)
            pairs.append(Pairs(regions, blocks, rows[skipped : skipped + count]))
            block, chunk = block + count, chunk + num_chunks
        assert (block, chunk) == (len(device.block_ids), len(host.block_ids))
        return pairs

    def get_finished(self) -> list[TransferResult]:
        return [result for each in self._directions for result in each.finished()]

    def wait(self, job_ids: set[int]) -> None:
        for each in self._directions:
            each.wait(job_ids)

    def shutdown(self) -> None:
        """Waits for transfers in progress: they access memory that is freed afterwards."""
        for each in self._directions:
            each.wait()
