"""Which device a worker takes."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import interface

from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.worker import NPUWorker


def worker(local_rank: int, **changes: object) -> NPUWorker:
    parallel = {
        "assigned_physical_gpu_ids": None,
        "distributed_executor_backend": "mp",
        "data_parallel_backend": "mp",
        "nnodes_within_dp": 1,
        "data_parallel_rank_local": 0,
        "data_parallel_index": 0,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
    }
    ours = NPUWorker.__new__(NPUWorker)
    ours.rank = ours.local_rank = local_rank
    ours.parallel_config = SimpleNamespace(**{**parallel, **changes})
    return ours


@pytest.fixture(autouse=True)
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    before = interface._assigned_physical_gpu_ids
    yield
    interface.set_assigned_physical_gpu_ids(before)


@pytest.mark.parametrize(
    ("local_rank", "changes", "device"),
    [
        (0, {}, 0),
        (1, {}, 1),
        # Replicas that share all devices count on from each other.
        (1, {"data_parallel_rank_local": 1}, 3),
        (1, {"data_parallel_rank_local": None, "data_parallel_index": 1}, 3),
        (0, {"data_parallel_rank_local": 1, "pipeline_parallel_size": 2, "tensor_parallel_size": 1},
         2),
        # A replica that was given devices counts among those.
        (0, {"data_parallel_rank_local": 1, "assigned_physical_gpu_ids": [2, 3]}, 2),
        (1, {"data_parallel_rank_local": 1, "assigned_physical_gpu_ids": [2, 3]}, 3),
        (1, {"assigned_physical_gpu_ids": [3, 0]}, 0),
        # Ray shows each worker its own devices.
        (0, {"data_parallel_rank_local": 1, "distributed_executor_backend": "ray"}, 0),
    ],
)  # fmt: skip
def test_each_worker_takes_its_own_device(local_rank: int, changes, device: int):
    assert worker(local_rank, **changes)._visible_device_index() == device


def test_an_assigned_device_is_found_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5,7")
    assert worker(0, assigned_physical_gpu_ids=[7])._visible_device_index() == 1


@pytest.mark.parametrize(
    ("local_rank", "changes", "count"),
    [
        (4, {}, 4),
        (2, {"assigned_physical_gpu_ids": [0, 1]}, 2),
        (1, {"data_parallel_rank_local": 2}, 4),
    ],
)
def test_a_rank_without_a_device_is_an_error_that_counts_them(local_rank: int, changes, count: int):
    with pytest.raises(DeviceError, match=f"this process may use {count}.*ASCEND_RT_VISIBLE"):
        worker(local_rank, **changes)._visible_device_index()
