"""The releases of torch, torch_npu and vLLM, as pinned in packages/core/pyproject.toml.

tests/contract/test_versions.py compares all other files that name one.
"""

import os
import re
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def read_toml(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content: dict[str, Any] = tomllib.load(file)
    return content


_CORE = read_toml(ROOT / "packages" / "core" / "pyproject.toml")["project"]


def _oldest(distribution: str) -> str:
    """Returns the lowest version of a requirement of core, such as `>=0.33.0,<0.34`."""
    for requirement in _CORE["dependencies"]:
        if found := re.fullmatch(rf"{distribution}[=>]=([\d.]+)(?:,.*)?", requirement):
            return found[1]
    raise LookupError(
        f"packages/core/pyproject.toml has no dependency `{distribution}==VERSION` or "
        f"`{distribution}>=VERSION,<...` among {_CORE['dependencies']}"
    )


def _python_range() -> tuple[tuple[int, int], tuple[int, int]]:
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", _CORE["requires-python"])
    if found is None:
        raise LookupError(
            f"requires-python of packages/core/pyproject.toml is {_CORE['requires-python']!r}; "
            "expected '>=3.X,<3.Y'"
        )
    return (3, int(found[1])), (3, int(found[2]) - 1)


# torch and torch_npu of another supported release, for environments with it.
OTHER_TORCH = "DAVINCI_TORCH"
TORCH_VERSION = os.environ.get(OTHER_TORCH, _oldest("torch"))
TORCH_NPU_VERSION = os.environ.get(OTHER_TORCH, _oldest("torch-npu"))
VLLM_VERSION = _oldest("vllm")
OLDEST_PYTHON, NEWEST_PYTHON = _python_range()


def commit() -> str:
    """Returns the short hash of the current commit."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.strip()  # fmt: skip


def stamp(*packages: str) -> str:
    """Returns the line with date, commit and versions for a page of figures.

    packages: folders under packages/ whose code is measured
    tests/contract/test_measurements.py reads the line.
    """
    measured = ", ".join(
        f"{name} {read_toml(ROOT / 'packages' / name / 'pyproject.toml')['project']['version']}"
        for name in packages
    )
    today = time.strftime("%Y-%m-%d")
    return f"Figures of {today} at commit {commit()}, with vLLM {VLLM_VERSION}; of {measured}."
