"""C++ programs that are linked with CANN's libraries run over virtual devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_davinci.vnpu import library_directory

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 120


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_program_without_python_and_torch_runs_an_operator(tmp_path: Path) -> None:
    """Its libraries find each other and libtorch: nothing says where those are."""
    spec = find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    headers = Path(spec.origin).parent / "include" / "third_party" / "acl" / "inc"
    program = tmp_path / "add_tensors"
    compiler = [
        "g++", "-std=c++17", f"-I{headers}", str(PROGRAMS / "add_tensors.cpp"), "-o", str(program),
        f"-L{library_directory()}", "-lascendcl", "-lopapi", "-lnnopbase",
        "-Wl,--allow-shlib-undefined",
    ]  # fmt: skip
    subprocess.run(compiler, check=True, timeout=LIMIT_S)
    command = [str(Path(sys.executable).with_name("vnpu")), "run", "--", str(program)]
    plain = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        command, env=plain, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "21 42 63 \n1 2 0.5\n1\n"
