"""The Triton backend that vLLM's V2 runner finds, tested in separate processes."""

import os
import sys
from pathlib import Path

from vllm_davinci_testing.processes.programs import run_to_end

LIMIT_S = 120
ACTIVE = """
from triton.backends import backends
print(sorted(name for name, each in backends.items() if name != "cpu" and each.driver.is_active()))
"""
LAUNCH = """
import torch
import triton
import triton.language as tl

@triton.jit
def _no_stand_in_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), 1)

try:
    _no_stand_in_kernel[(1,)](torch.zeros(16, dtype=torch.int32, device="npu"), BLOCK=16)
except NotImplementedError as error:
    print(error)
"""


def output_of(program: str, tmp_path: Path, **environment: str) -> str:
    file = tmp_path / "program.py"
    file.write_text(program)
    ended = run_to_end(
        [sys.executable, str(file)],
        LIMIT_S,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", **environment},
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def test_it_is_silent_without_canns_libraries(tmp_path: Path):
    without = {"LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_PRELOAD": ""}
    told = output_of(ACTIVE, tmp_path, **without)
    assert told.split("\n")[-2] == "[]"


def test_it_is_active_on_an_npu_and_names_a_kernel_without_a_stand_in(tmp_path: Path):
    told = output_of(ACTIVE + LAUNCH, tmp_path)
    assert "['npu']" in told.split("\n")
    assert "_no_stand_in_kernel of " in told and "program.py" in told
    assert "Start without that option" in told
