"""Processes forked before a device is opened compute as new ones do."""

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


def test_no_child_is_to_be_forked_where_it_would_lose_a_report(tmp_path) -> None:
    program = "from vllm_davinci import vnpu; import torch; print(vnpu.can_fork())"
    for settings in ({"VNPU_RACES": "report"}, {"VNPU_TRACE": str(tmp_path)}):
        assert run_to_exit(program, **settings).stdout.split()[0] == "False"
    assert run_to_exit(program).stdout.split()[0] == "True"
