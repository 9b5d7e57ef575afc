"""A process forked before a device is opened computes like a new process."""

import pytest

from vllm_davinci_testing.processes.forked import run_to_exit
from vllm_davinci_testing.processes.programs import run_program

PRODUCT = """
import os
import torch
from vllm_davinci import vnpu

def product() -> float:
    left = torch.ones(64, 512, device="npu", dtype=torch.bfloat16)
    return float((left @ torch.ones(512, 512, device="npu", dtype=torch.bfloat16)).sum().cpu())
"""


def test_a_child_forked_after_parallel_work_of_the_host_has_the_devices() -> None:
    result = run_program(
        PRODUCT
        + """
torch.set_num_threads(2)
torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # OpenMP's threads stay, and wait for more
assert vnpu.can_fork()
child = os.fork()
if child == 0:
    assert vnpu.can_fork()
    torch.ones(2000, 2000) @ torch.ones(2000, 2000)
    os._exit(0 if product() == 64 * 512 * 512 else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert vnpu.can_fork()
assert product() == 64 * 512 * 512
print("opened:", vnpu.can_fork())
"""
    )
    assert result.returncode == 0, result.stderr
    assert "opened: False" in result.stdout


def test_no_child_is_forked_if_it_would_lose_a_report(tmp_path) -> None:
    program = "from vllm_davinci import vnpu; import torch; print(vnpu.can_fork())"
    for settings in ({"VNPU_RACES": "report"}, {"VNPU_TRACE": str(tmp_path)}):
        assert run_to_exit(program, **settings).stdout.split()[0] == "False"
    assert run_to_exit(program).stdout.split()[0] == "True"


@pytest.mark.nightly("operators")
def test_a_child_forked_after_the_devices_are_open_gets_an_error_at_once() -> None:
    """Forks while another thread launches and sometimes holds a lock."""
    result = run_program(
        PRODUCT
        + """
import ctypes
import threading
import time

assert product() == 64 * 512 * 512
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
event, tensor = torch.npu.Event(), torch.ones(4, device="npu")
event.record()
# torch_npu answers "not yet" for as long as the record is in its own queue, whose thread a child
# has not.
event.synchronize()
stop = threading.Event()

def launch():
    while not stop.is_set():
        tensor.add_(1.0)

thread = threading.Thread(target=launch, daemon=True)
thread.start()
for number in range(40):
    child = os.fork()
    if child == 0:
        status = acl.aclrtSynchronizeDevice()
        text = acl.aclGetRecentErrMsg().decode()
        told = "was forked from one that had opened its devices" in text
        address = ctypes.c_void_p()
        refused = acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(512), 0) == 107002
        try:
            while not event.query():
                pass
            polled = False
        except RuntimeError:
            polled = True
        os._exit(0 if status == 107002 and told and refused and polled else 1)
    end = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.002)
    assert ended == (child, 0), (number, ended)
stop.set()
thread.join()
child = os.fork()
if child == 0:
    raise SystemExit(0)  # with C's and Python's exit handlers, beside tensors of the parent
assert os.waitpid(child, 0) == (child, 0)
assert product() == 64 * 512 * 512
print("lived")
"""
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "lived" in result.stdout
