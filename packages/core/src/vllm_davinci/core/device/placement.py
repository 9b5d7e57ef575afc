"""Which of a host's devices a worker takes."""

from vllm.config import ParallelConfig

from vllm_davinci.core.errors import DeviceError


def logical_device(local_rank: int, parallel: ParallelConfig, num_visible: int) -> int:
    """Number of a worker's device among those its engine may use.

    local_rank:  the worker's rank among its engine's workers on this host
    num_visible: devices this process can see
    Raises DeviceError when there are not that many devices.
    """
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is not None:
        # The engine was given its own devices, and counts among those.
        return _checked(local_rank, len(assigned))
    shares_all_devices = (
        parallel.distributed_executor_backend not in ("ray", "external_launcher")
        and parallel.data_parallel_backend != "ray"
        and parallel.nnodes_within_dp == 1
    )
    if not shares_all_devices:
        return _checked(local_rank, num_visible)
    replica = parallel.data_parallel_rank_local
    if replica is None:
        replica = parallel.data_parallel_index
    ranks_per_replica = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
    return _checked(replica * ranks_per_replica + local_rank, num_visible)


def _checked(number: int, count: int) -> int:
    if number >= count:
        raise DeviceError(
            f"A worker needs NPU number {number} of those its engine may use, which are {count}, "
            "counted from 0. Lower --tensor-parallel-size, --pipeline-parallel-size or "
            "--data-parallel-size, or make more devices visible with ASCEND_RT_VISIBLE_DEVICES."
        )
    return number
