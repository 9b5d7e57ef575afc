"""C++ programs linked with CANN's libraries run on virtual devices."""

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


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def run_program(directory: Path, name: str, *options: str) -> str:
    """Compiles a program with these options and runs it; returns its output."""
    spec = find_spec("torch_npu")
    assert spec is not None and spec.origin is not None
    headers = Path(spec.origin).parent / "include" / "third_party" / "acl" / "inc"
    program = directory / name
    compiler = [
        "g++", f"-I{headers}", str(PROGRAMS / f"{name}.cpp"), "-o", str(program),
        f"-L{library_directory()}", *options, "-Wl,--allow-shlib-undefined",
    ]  # fmt: skip
    subprocess.run(compiler, check=True, timeout=LIMIT_S)
    command = [str(Path(sys.executable).with_name("vnpu")), "run", "--", str(program)]
    plain = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        command, env=plain, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_without_python_and_torch_runs_an_operator(tmp_path: Path) -> None:
    """CANN's libraries find each other and libtorch without a library path."""
    printed = run_program(
        tmp_path, "add_tensors", "-std=c++17", "-lascendcl", "-lopapi", "-lnnopbase"
    )
    assert printed == "21 42 63 \n1 2 0.5\n1\n"
