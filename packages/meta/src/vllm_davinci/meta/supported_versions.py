"""Supported versions, and their comparison with the installed ones."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import dataclass

from vllm_davinci.meta.errors import UnsupportedVersionError


@dataclass(frozen=True)
class Requirement:
    """A third-party package and its supported release.

    version: the release that this one is tested with
    parts:   number of leading parts that must agree: 2 with 0.33.0 accepts every 0.33.x
    remedy:  command that installs the version, with {version} in its place
    """

    distribution: str
    version: str
    parts: int
    remedy: str

    @property
    def release(self) -> list[str]:
        return self.version.split(".")[: self.parts]

    @property
    def supported(self) -> str:
        return ".".join(self.release) + (".x" if self.parts < 3 else "")

    @property
    def command(self) -> str:
        return self.remedy.format(version=self.version)

    def accepts(self, version: str) -> bool:
        """True if `version` belongs to the release; local parts such as `+cpu` do not count."""
        return version.split("+")[0].split(".")[: self.parts] == self.release


TORCH = Requirement("torch", "2.13.0", 3, "pip install torch=={version}")
TORCH_NPU = Requirement("torch_npu", "2.13.0", 3, "pip install torch-npu=={version}")
# vLLM's own wheels are for CUDA, and need its libraries.
VLLM = Requirement(
    "vllm",
    "0.33.0",
    2,
    "VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={version} "
    "pip install --no-cache-dir --no-binary vllm vllm=={version}",
)
REQUIREMENTS = (TORCH, TORCH_NPU, VLLM)

# An unsupported vLLM to accept, for porting to it.
ACCEPTED_VLLM = "DAVINCI_ACCEPT_VLLM"
# Versions of Python for which torch_npu has wheels.
PYTHON_MINIMUM, PYTHON_MAXIMUM = (3, 11), (3, 13)


def installed_version(distribution: str) -> str | None:
    """Version in the installed metadata, or None if the distribution is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem_with(requirement: Requirement) -> str | None:
    """Describes the problem with a package's installed version, or None."""
    seen = installed_version(requirement.distribution)
    if seen is not None and requirement.accepts(seen):
        return None
    if requirement is VLLM and seen is not None and seen == os.environ.get(ACCEPTED_VLLM):
        return None
    what = "is not installed" if seen is None else f"{seen} is installed"
    return (
        f"{requirement.distribution} {what}, and this release of vllm-davinci supports "
        f"{requirement.supported}. Run: {requirement.command}"
    )


def problem_with_python() -> str | None:
    """Describes the problem with the running Python's version, or None."""
    if PYTHON_MINIMUM <= sys.version_info[:2] <= PYTHON_MAXIMUM:
        return None
    seen, oldest, newest = (
        ".".join(map(str, version))
        for version in (sys.version_info[:3], PYTHON_MINIMUM, PYTHON_MAXIMUM)
    )
    return (
        f"Python {seen} is running, and torch_npu {TORCH_NPU.version} exists for Python {oldest} "
        f"to {newest}"
    )


def check_supported_versions() -> None:
    """Raises UnsupportedVersionError, which names every package in an unsupported version."""
    problems = [problem_with_python(), *map(problem_with, REQUIREMENTS)]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise UnsupportedVersionError("\n".join(found))
