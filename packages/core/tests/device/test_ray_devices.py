"""Ray's NPUs are counted before an engine waits for them."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.device import ray_devices
from vllm_davinci.core.device.ray_devices import check_ray_devices
from vllm_davinci.core.errors import DeviceError


def parallel(**changes: Any) -> Any:
    values = {
        "distributed_executor_backend": "ray",
        "placement_group": None,
        "data_parallel_backend": "mp",
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "world_size": 8,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how many NPUs are requested from a cluster with 8 NPUs, 7 of them free."""
    asked: list[int] = []

    def counts(needed: int) -> tuple[int, int]:
        asked.append(needed)
        return 8, 7

    monkeypatch.setattr(ray_devices, "_counts", counts)
    return asked


def test_too_few_npus_are_reported_with_their_number(asked: list[int]):
    with pytest.raises(DeviceError, match=r"8 NPUs .* cluster has 8, of which 7 are free"):
        check_ray_devices(parallel())
    assert asked == [8]


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"world_size": 7}, [7]),
        ({"world_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 2}, [4]),
        ({"distributed_executor_backend": "mp"}, []),
        ({"placement_group": object()}, []),
    ],
)
def test_enough_npus_or_another_executor_pass(asked, changes, needed):
    check_ray_devices(parallel(**changes))
    assert asked == needed


def test_engines_that_ray_places_too_are_counted_together(asked: list[int]):
    options = {"world_size": 2, "data_parallel_size": 4, "data_parallel_backend": "ray"}
    with pytest.raises(DeviceError, match=r"8 NPUs are needed .* data parallel 4"):
        check_ray_devices(parallel(**options))
    assert asked == [8]
