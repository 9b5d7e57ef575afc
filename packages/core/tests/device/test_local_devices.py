"""Each worker's device, for each way in which DP ranks can share a host."""

import pytest
from vllm.config import ParallelConfig

from vllm_davinci.core.device.local_devices import check_device_count, logical_device
from vllm_davinci.core.errors import DeviceError


def parallel(**changes: object) -> ParallelConfig:
    config = ParallelConfig()
    values = {
        "assigned_physical_gpu_ids": None,
        "distributed_executor_backend": "mp",
        "data_parallel_rank_local": 0,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
    }
    for name, value in {**values, **changes}.items():
        setattr(config, name, value)
    config.world_size = config.tensor_parallel_size * config.pipeline_parallel_size
    return config


@pytest.mark.parametrize(
    ("local_rank", "changes", "device"),
    [
        (0, {}, 0),
        (1, {}, 1),
        # DP ranks that share all devices number them consecutively.
        (1, {"data_parallel_rank_local": 1}, 3),
        (1, {"data_parallel_rank_local": None, "data_parallel_index": 1}, 3),
        (0, {"data_parallel_rank_local": 1, "pipeline_parallel_size": 2}, 4),
        # A DP rank with assigned devices counts within these.
        (0, {"data_parallel_rank_local": 1, "assigned_physical_gpu_ids": [2, 3]}, 0),
        (1, {"data_parallel_rank_local": 1, "assigned_physical_gpu_ids": [2, 3]}, 1),
        # Ray shows each DP rank only its own devices.
        (0, {"data_parallel_rank_local": 1, "distributed_executor_backend": "ray"}, 0),
        (0, {"data_parallel_rank_local": 1, "data_parallel_backend": "ray"}, 0),
    ],
)
def test_each_worker_takes_its_own_device(local_rank: int, changes, device: int):
    assert logical_device(local_rank, parallel(**changes), num_visible=8) == device


@pytest.mark.parametrize(
    ("local_rank", "changes", "count"),
    [
        (4, {}, 4),
        (2, {"assigned_physical_gpu_ids": [0, 1]}, 2),
        (1, {"data_parallel_rank_local": 2}, 4),
    ],
)
def test_a_rank_without_a_device_is_an_error_that_counts_them(local_rank: int, changes, count):
    with pytest.raises(DeviceError, match=rf"may use {count} NPUs, .*ASCEND_RT_VISIBLE_DEVICES"):
        logical_device(local_rank, parallel(**changes), num_visible=4)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, 2),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, 4),
        # An engine over two hosts has half of its ranks on this host.
        ({"tensor_parallel_size": 8, "nnodes": 2}, 4),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, 2),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "nnodes": 2}, 4),
    ],
)
def test_the_devices_of_this_host_are_counted(changes, needed):
    config = parallel(**changes)
    check_device_count(config, needed)
    with pytest.raises(DeviceError, match=rf"{needed} NPUs are needed .* and {needed - 1} are"):
        check_device_count(config, needed - 1)
