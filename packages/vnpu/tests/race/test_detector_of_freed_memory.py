"""The race detector finds memory freed while launches may still use it."""

import pytest

from vllm_davinci_testing.processes.forked import run_to_exit

# A launch uses two blocks of device memory; one of them is freed, after a wait or without.
FREES = """
import ctypes
from ctypes import byref, c_size_t
acl = ctypes.CDLL("libascendcl.so")
device, other, third, stream, idle, event = (ctypes.c_void_p() for _ in range(6))
acl.aclrtSetDevice(0)
for memory in (device, other, third):
    acl.aclrtMalloc(byref(memory), c_size_t(512), 0)
acl.aclrtCreateStream(byref(stream))
acl.aclrtCreateStream(byref(idle))
acl.aclrtCreateEvent(byref(event))
acl.aclrtMemsetAsync(third, c_size_t(512), 0, c_size_t(512), idle)
acl.aclrtMemcpyAsync(device, c_size_t(64), other, c_size_t(64), 3, stream)
acl.aclrtRecordEvent(event, stream)
{wait}
print("status", acl.aclrtFree({freed}))
"""
ENOUGH = {
    "its stream": "acl.aclrtSynchronizeStream(stream)",
    "an event behind it": "acl.aclrtSynchronizeEvent(event)",
    "the device": "acl.aclrtSynchronizeDevice()",
}


@pytest.mark.parametrize("wait", ["", "acl.aclrtSynchronizeStream(idle)"], ids=["none", "another"])
@pytest.mark.parametrize(("freed", "use"), [("device", "write"), ("other", "read")])
def test_memory_that_is_freed_while_a_launch_may_use_it_is_found(wait, freed, use):
    source = FREES.format(wait=wait, freed=freed)
    done = run_to_exit(source, VNPU_RACES="report")
    line = source[: source.index("print")].count("\n") + 1
    assert "status 0" in done.stdout, done.stderr
    assert f"{use} by memory copy on stream" in done.stderr
    assert f"freed by the host at\n      <program>:{line} in <module>" in done.stderr
    assert "vnpu: 1 race found." in done.stderr
    assert "aclrtFree does not wait:" in done.stderr


@pytest.mark.parametrize("wait", ENOUGH)
def test_memory_that_is_freed_behind_a_wait_for_its_launches_is_no_race(wait: str) -> None:
    source = FREES.format(wait=ENOUGH[wait], freed="device")
    done = run_to_exit(source, VNPU_RACES="report")
    assert "status 0" in done.stdout
    assert "vnpu: 0 races found." in done.stderr


def test_raise_keeps_memory_that_a_launch_may_use() -> None:
    done = run_to_exit(FREES.format(wait="", freed="device"), VNPU_RACES="raise")
    assert "status 0" not in done.stdout
    assert "status" in done.stdout


@pytest.mark.parametrize("queue", ["0", "1"])
def test_torch_npu_waits_before_it_frees(queue: str) -> None:
    """Frees segments of the allocator, and a workspace that grows."""
    done = run_to_exit(
        """
        import torch
        for size in (1, 8, 16):
            x = torch.ones(size << 20, device="npu")
            y = (x * 2.0).sort().values
            del x, y
            torch.npu.empty_cache()
        """,
        VNPU_RACES="report",
        VNPU_SOC="Ascend910B3",
        TASK_QUEUE_ENABLE=queue,
    )
    assert done.status == 0, done.stderr
    assert "vnpu: 0 races found." in done.stderr
