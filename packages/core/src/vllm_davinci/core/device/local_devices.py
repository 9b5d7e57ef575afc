"""Devices of this host: checks their number and assigns one to each worker."""

import os
from typing import TYPE_CHECKING

from vllm_davinci.core.errors import DeviceError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"


def check_device_count(parallel: "ParallelConfig", num_visible: int) -> None:
    """Raises DeviceError if this host has fewer devices than ranks of the engine."""
    if parallel.distributed_executor_backend in ("ray", "external_launcher"):
        return
    if parallel.data_parallel_backend == "ray":
        return
    ranks, hosts = _engine_ranks_here(parallel), parallel.nnodes_within_dp
    dp_size = max(parallel.data_parallel_size_local, 1)
    if ranks * dp_size <= num_visible:
        return
    raise DeviceError(
        f"{ranks * dp_size} NPUs are needed (tensor parallel "
        f"{parallel.tensor_parallel_size} x pipeline parallel "
        f"{parallel.pipeline_parallel_size}{f' over {hosts} hosts' if hosts > 1 else ''} x data "
        f"parallel on this host {dp_size}) and {num_visible} are visible "
        f"({VISIBLE_DEVICES} is {os.environ.get(VISIBLE_DEVICES) or 'not set'}). Lower "
        "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, make more "
        f"devices visible with {VISIBLE_DEVICES}, or share the ranks among more hosts with "
        "--nnodes."
    )


def logical_device(local_rank: int, parallel: "ParallelConfig", num_visible: int) -> int:
    """Index of a worker's device among the devices of its engine.

    local_rank:  the worker's rank among its engine's workers on this host
    num_visible: devices this process can see
    Raises DeviceError if there are fewer devices.
    """
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is not None:
        # The engine got its own devices, and uses indices of these.
        return _checked(local_rank, len(assigned))
    return _checked(parallel.get_local_gpu_index(local_rank), num_visible)


def place_among_workers(device: int, parallel: "ParallelConfig") -> tuple[int, int]:
    """Index of a worker among those on this host, and their number.

    device: logical index of its device, from logical_device
    """
    ranks = _engine_ranks_here(parallel)
    count = ranks * max(parallel.data_parallel_size_local, 1)
    if parallel.assigned_physical_gpu_ids is not None:
        device += ranks * (parallel.data_parallel_rank_local or 0)
    return device % count, count


def _engine_ranks_here(parallel: "ParallelConfig") -> int:
    """Ranks on this host of one data-parallel engine."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return max(ranks // parallel.nnodes_within_dp, 1)


def _checked(number: int, count: int) -> int:
    if number >= count:
        raise DeviceError(
            f"A worker needs NPU {number}, and its engine may use {count} NPUs, counted from 0. "
            "Lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, or "
            f"make more devices visible with {VISIBLE_DEVICES}."
        )
    return number
