"""Programs that profile with torch_npu.profiler end well, and have the host's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.programs import run_program

PROGRAM = """
import ctypes, torch, torch_npu
from torch_npu.profiler import ProfilerActivity, profile, tensorboard_trace_handler

def main():
    x = torch.ones(64, 64, device="npu")
    for directory in {directories}:
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.NPU],
            on_trace_ready=tensorboard_trace_handler(directory),
        ) as seen:
            for _ in range(2):
                y = torch.relu(x @ x)
                seen.step()
            torch.npu.synchronize()
    print("sum", float(y.sum()))
    lib = ctypes.CDLL("libascendcl.so")
    lib.aclprofCreateConfig.restype = ctypes.c_void_p
    device = (ctypes.c_uint32 * 1)(0)
    config = ctypes.c_void_p(lib.aclprofCreateConfig(device, 1, 0xFF, None, ctypes.c_uint64(1)))
    calls = [lib.aclprofStart(config), lib.aclprofInit(None, 0), lib.aclprofFinalize(),
             lib.aclprofInit(b"/tmp", 4), lib.aclprofInit(b"/tmp", 4), lib.aclprofStart(config),
             lib.aclprofStart(config), lib.aclprofDestroyConfig(config), lib.aclprofFinalize(),
             lib.aclprofStop(None), lib.aclprofStop(config), lib.aclprofDestroyConfig(config),
             lib.aclprofDestroyConfig(config), lib.aclprofFinalize()]
    print("statuses", *(int(status == 0) for status in calls))

if __name__ == "__main__":
    main()
"""


def test_a_profile_has_the_host_s_events_and_says_where_the_device_s_are(tmp_path: Path):
    directories = [str(tmp_path / name) for name in ("first", "second")]
    done = run_program(PROGRAM.replace("{directories}", repr(directories)), VirtualDeviceConfig())
    assert done.returncode == 0, done.stderr
    assert f"sum {64.0**3:.1f}" in done.stdout
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "[ERROR]" in line]
    assert all("CANN Profiling data does not exist" in line for line in errors), errors
    assert done.stderr.count("torch_npu.profiler records the host's events alone") == 1
    for directory in directories:
        (trace,) = Path(directory).glob("*/ASCEND_PROFILER_OUTPUT/trace_view.json")
        events: list[dict[str, Any]] = json.loads(trace.read_text())
        names = [event["name"] for event in events]
        assert names.count("aten::matmul") == names.count("aten::relu") == 2
    statuses = done.stdout.split("statuses ")[1].split()
    assert statuses == list("00010100001101")
