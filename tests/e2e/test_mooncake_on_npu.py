"""Mooncake's own build for NPUs, over the virtual device's libraries: protocol `ascend`.

Its package has the same modules as the one for the host: `nox -s conformance -- mooncake_npu` puts
it into a folder of its own, and this file's tests before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

LIMIT_S = 240
COMMON = """
import json, sys
import torch
from mooncake.engine import TransferEngine

torch.npu.set_device(DEVICE)
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "") == 0
memory = torch.full((4 << 20,), DEVICE + 1, dtype=torch.uint8, device="npu")
torch.npu.synchronize()
begin, size = memory.data_ptr(), memory.numel()
assert engine.register_memory(begin, size) == 0
"""
SERVES = """
print(json.dumps([f"127.0.0.1:{engine.get_rpc_port()}", begin]), flush=True)
sys.stdin.readline()
print(json.dumps([memory[:1000].unique().tolist(), memory[1000:].unique().tolist()]), flush=True)
"""
ASKS = """
there, address = json.loads(sys.stdin.readline())
written = engine.transfer_sync_write(there, begin, address, 1000)
read = engine.transfer_sync_read(there, begin + 1000, address + 1000, 5000)
beyond = engine.transfer_sync_read(there, begin, address + size - 8, 16)
values = [memory[:1000].unique().tolist(), memory[1000:6000].unique().tolist()]
print(json.dumps([written, read, beyond, values, memory[6000:].unique().tolist()]), flush=True)
"""


def is_installed() -> bool:
    try:
        return bool(version("mooncake-transfer-engine-npu"))
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.nightly("hosts"),
    pytest.mark.skipif(
        not is_installed(), reason="needs mooncake-transfer-engine-npu: conformance -- mooncake_npu"
    ),
]


def started(program: str, device: int) -> subprocess.Popen[str]:
    source = COMMON.replace("DEVICE", str(device)) + program
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_write_and_read_each_other_s_device_memory():
    serves, asks = started(SERVES, 0), started(ASKS, 1)
    try:
        said = serves.stdout.readline()
        assert said, serves.communicate(timeout=LIMIT_S)[1][-4000:]
        out, errors = asks.communicate(said, timeout=LIMIT_S)
        assert asks.returncode == 0, errors[-4000:]
        seen, _ = serves.communicate("go\n", timeout=LIMIT_S)
    finally:
        for process in (serves, asks):
            process.kill()
            process.wait()
    written, read, beyond, values, rest = json.loads(out.splitlines()[-1])
    assert (written, read) == (0, 0)
    assert beyond != 0, "bytes behind the registered memory"
    assert (values, rest) == ([[2], [1]], [2])
    assert json.loads(seen.splitlines()[-1]) == [[2], [1]]
