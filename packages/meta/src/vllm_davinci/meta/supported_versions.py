"""Supported versions, and their comparison with the installed ones."""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_davinci.meta.errors import UnsupportedVersionError


@dataclass(frozen=True)
class Requirement:
    """A third-party package and its supported release.

    version: the release that this one is tested with
    parts:   number of leading parts that must agree: 2 with 0.33.0 accepts every 0.33.x
    remedy:  command that installs the version, with {version} in its place
    others:  further releases that are tested, less often
    """

    distribution: str
    version: str
    parts: int
    remedy: str
    others: tuple[str, ...] = ()

    @property
    def releases(self) -> list[list[str]]:
        return [version.split(".")[: self.parts] for version in (self.version, *self.others)]

    @property
    def supported(self) -> str:
        names = [".".join(release) for release in self.releases]
        return " and ".join(name + (".x" if self.parts < 3 else "") for name in names)

    @property
    def command(self) -> str:
        return self.remedy.format(version=self.version)

    def accepts(self, version: str) -> bool:
        """True if `version` belongs to a supported release; local parts such as `+cpu` are
        ignored.
        """
        return version.split("+")[0].split(".")[: self.parts] in self.releases


TORCH = Requirement("torch", "2.13.0", 3, "pip install torch=={version}", ("2.14.0",))
TORCH_NPU = Requirement("torch_npu", "2.13.0", 3, "pip install torch-npu=={version}", TORCH.others)
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
        return _problem_beside_torch(seen) if requirement is TORCH_NPU else None
    if requirement is VLLM and seen is not None and seen == os.environ.get(ACCEPTED_VLLM):
        return None
    what = "is not installed" if seen is None else f"{seen} is installed"
    return (
        f"{requirement.distribution} {what}, and this release of vllm-davinci supports "
        f"{requirement.supported}. Run: {requirement.command}"
    )


def _problem_beside_torch(torch_npu: str) -> str | None:
    """Describes a mismatch between torch_npu and a supported torch; None if they match."""
    torch = (installed_version(TORCH.distribution) or "").split("+")[0]
    if not TORCH.accepts(torch):
        return None
    if torch_npu.split(".")[:2] != torch.split(".")[:2]:
        remedy = TORCH_NPU.remedy.format(version=torch)
        return f"torch_npu {torch_npu} is not for the installed torch {torch}. Run: {remedy}"
    # Both register an option of the allocator, pinned_reserve_segment_size_mb: the process aborts.
    if not torch_npu.startswith("2.13.") and is_for_cuda():
        return (
            f"torch_npu {torch_npu} cannot be loaded into torch's build for CUDA, which is "
            f"installed. Install torch {torch} for the CPU, from PyTorch's index: the package "
            "index has it for aarch64 only"
        )
    return None


def is_for_cuda() -> bool:
    """True if the installed torch is a build for CUDA. Does not import it."""
    found = importlib.util.find_spec("torch")
    places = found.submodule_search_locations if found is not None else None
    return any((Path(place) / "lib" / "libc10_cuda.so").exists() for place in places or ())


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
