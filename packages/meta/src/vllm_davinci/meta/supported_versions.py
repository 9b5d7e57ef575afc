"""The versions this release is made for, and the comparison with what is installed."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass

from vllm_davinci.meta.errors import UnsupportedVersionError


@dataclass(frozen=True)
class Requirement:
    """One third-party package and the release that works.

    release: the leading parts that must agree, so (0, 29) accepts every 0.29.x
    """

    distribution: str
    release: tuple[int, ...]
    remedy: str

    @property
    def supported(self) -> str:
        return ".".join(map(str, self.release)) + (".x" if len(self.release) < 3 else "")

    def accepts(self, version: str) -> bool:
        """Whether `version` belongs to the release; local parts such as `+cpu` do not count."""
        parts = version.split("+")[0].split(".")
        return tuple(parts[: len(self.release)]) == tuple(map(str, self.release))


TORCH = Requirement("torch", (2, 13, 0), "pip install torch==2.13.0")
TORCH_NPU = Requirement("torch_npu", (2, 13, 0), "pip install torch-npu==2.13.0")
# The built-in targets of vLLM's own wheels shadow nothing here, but they need CUDA's libraries.
VLLM = Requirement(
    "vllm",
    (0, 29),
    "VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.29.0 "
    "pip install --no-cache-dir --no-binary vllm vllm==0.29.0",
)
REQUIREMENTS = (TORCH, TORCH_NPU, VLLM)

# torch_npu 2.13.0 has wheels for these.
PYTHON_MINIMUM, PYTHON_MAXIMUM = (3, 10), (3, 13)


def installed_version(distribution: str) -> str | None:
    """Version in the installed metadata, or None when the distribution is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem_with(requirement: Requirement) -> str | None:
    """What is wrong with the installed version of one package, or None."""
    seen = installed_version(requirement.distribution)
    if seen is not None and requirement.accepts(seen):
        return None
    what = "is not installed" if seen is None else f"{seen} is installed"
    return (
        f"{requirement.distribution} {what}, and this release of vllm-davinci supports "
        f"{requirement.supported}. Run: {requirement.remedy}"
    )


def problem_with_python() -> str | None:
    """What is wrong with the running Python's version, or None."""
    if PYTHON_MINIMUM <= sys.version_info[:2] <= PYTHON_MAXIMUM:
        return None
    seen = ".".join(map(str, sys.version_info[:3]))
    return f"Python {seen} is running, and torch_npu 2.13.0 exists for Python 3.10 to 3.13"


def check_supported_versions() -> None:
    """Raise UnsupportedVersionError that names every package of an unsupported version."""
    problems = [problem_with_python(), *map(problem_with, REQUIREMENTS)]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise UnsupportedVersionError("\n".join(found))
