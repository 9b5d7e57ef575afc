"""Settings that no device supports are refused before the device is opened."""

import math

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig, VirtualDeviceError
from vllm_davinci_testing.processes.forked import run_to_exit


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0, 0.0, 1e300])
def test_a_wait_that_no_clock_can_measure_is_refused(seconds: float) -> None:
    with pytest.raises(VirtualDeviceError, match="expected seconds above 0, at most 1e9"):
        VirtualDeviceConfig(wait_limit=seconds)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VNPU_WAIT_LIMIT", "inf", "above 0, at most 1e9"),
        ("VNPU_WAIT_LIMIT", "nan", "above 0, at most 1e9"),
        ("VNPU_MEMORY", "20000000000GiB", "VNPU_MEMORY does not fit into 64 bits"),
    ],
)
def test_a_variable_out_of_range_is_refused_by_its_name(name, value, message):
    ended = run_to_exit("import torch; torch.ones(1, device='npu')", **{name: value})
    assert ended.status == 1
    assert message in ended.output
