"""Runs processes with and without CANN's libraries on the loader path."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import run_to_end

# Covers importing torch, torch_npu and vLLM on a busy machine with two cores.
PROCESS_LIMIT_S = 240

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_without_device() -> RunPython:
    """Runs this Python with arguments in a process that finds no CANN library."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        dropped = {"LD_LIBRARY_PATH", "LD_PRELOAD", "VNPU_ACTIVE", "ASCEND_HOME_PATH"}
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return _run([sys.executable, *arguments], {**kept, **variables})

    return run


@pytest.fixture
def run_on_vnpu() -> RunPython:
    """Runs this Python with arguments over the virtual NPU."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        vnpu = Path(sys.executable).parent / "vnpu"
        return _run(
            [str(vnpu), "run", "--", sys.executable, *arguments], {**os.environ, **variables}
        )

    return run


@pytest.fixture
def pretend_version(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes metadata that hides the installed metadata; returns the PYTHONPATH to set."""

    def write(distribution: str, version: str) -> str:
        metadata = tmp_path / f"{distribution}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        return str(tmp_path)

    return write


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_to_end(command, PROCESS_LIMIT_S, env=environment, stdin=subprocess.DEVNULL)
