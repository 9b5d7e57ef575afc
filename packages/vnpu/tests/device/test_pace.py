"""Artificial task times, for programs whose overlap should show in wall time."""

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of, run_alone

# Times eight products on each of two streams, in milliseconds of wall time.
PRODUCTS = """
import time, torch
streams = [torch.npu.Stream(), torch.npu.Stream()]
x = torch.ones(64, 64, device="npu")
torch.npu.synchronize()
begin = time.perf_counter()
for _ in range(8):
    for stream in streams:
        with torch.npu.stream(stream):
            y = x.mm(x)
launched = time.perf_counter()
torch.npu.synchronize()
end = time.perf_counter()
assert y[0, 0].item() == 64
print(int((launched - begin) * 1000), int((end - begin) * 1000))
"""


def milliseconds(schedule: str, pace: str) -> tuple[int, int]:
    (line,) = output_of(PRODUCTS, VirtualDeviceConfig(schedule=schedule), VNPU_PACE=pace)
    launch, whole = line.split()
    return int(launch), int(whole)


def test_streams_sleep_side_by_side_with_a_thread_each():
    launch, whole = milliseconds("threads", "aclnnM=1000,aclnnMm=50000,all_reduce=9000000")
    assert whole >= 400
    # 800 ms in series. Launches do not wait for the device.
    assert whole < 700
    assert launch < 300


def test_tasks_follow_one_another_where_one_thread_runs_them_all():
    _, whole = milliseconds("eager", "aclnnM=50000")
    assert whole >= 800


def test_an_artificial_time_may_depend_on_written_bytes():
    # 64 x 64 floats are 1/64 MiB, which takes 50 ms.
    _, whole = milliseconds("eager", "aclnnM=8000000/MiB,aclnnMm=3200000/MiB")
    assert 800 <= whole < 1600


@pytest.mark.parametrize(
    "text", ["aclnnMm", "aclnnMm=5/KiB", "=5", "aclnnMm=", "aclnnMm=-1", "a=1,b=2x", "a=1e9"]
)
def test_text_that_does_not_parse_is_refused(text: str):
    ended = run_alone(PRODUCTS, VNPU_PACE=text)
    assert ended.status != 0
    assert "Expected NAME=MICROSECONDS" in ended.stderr
