"""The Triton backend that vLLM's V2 runner finds, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    ended = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def test_it_is_active_on_an_npu(tmp_path: Path):
    assert output_of(ACTIVE, tmp_path).split("\n")[-2] == "['npu']"


def test_it_is_silent_without_canns_libraries(tmp_path: Path):
    without = {"LD_LIBRARY_PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_PRELOAD": ""}
    told = output_of(ACTIVE, tmp_path, **without)
    assert told.split("\n")[-2] == "[]"


def test_a_kernel_without_a_stand_in_ends_with_its_name(tmp_path: Path):
    told = output_of(LAUNCH, tmp_path)
    assert "_no_stand_in_kernel of " in told and "program.py" in told
    assert "Start without that option" in told
