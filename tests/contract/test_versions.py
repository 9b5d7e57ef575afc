"""Versions are pinned in core's pyproject.toml only; all copies agree."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_davinci.meta import supported_versions

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ("torch", "torch-npu", "vllm")
# Finds "torch==2.13.0", "torch-npu 2.13.0", "vLLM 0.33"; ranges ("vllm>=0.33.0") are read from
# metadata.
NAMED = re.compile(r"\b(torch(?:[-_]npu)?|vllm)(?:==| )v?(\d+\.\d+(?:\.\d+)?)\b", re.IGNORECASE)
# Measurements keep the releases that they were made with.
STAMP = re.compile(r"^Figures of .*$", re.MULTILINE)
SUFFIXES = {".py", ".pyi", ".toml", ".md", ".yml", ".sh", ".txt", ".cmake", ".h", ".cpp"}
# These files name other versions on purpose, or versions of measurements.
OF_THEIR_OWN = (
    "packages/meta/tests/",
    "docs/measurements/",
    "checkpoints/",
    "tests/contract/test_measurements.py",
    "tests/contract/test_upstream_hooks.py",
)


@pytest.fixture(scope="module")
def read_toml() -> Any:
    sys.path.insert(0, str(ROOT / "ci"))
    try:
        return import_module("versions").read_toml
    finally:
        sys.path.remove(str(ROOT / "ci"))


@pytest.fixture(scope="module")
def projects(packages: list[Path], read_toml: Any) -> dict[str, Any]:
    """Returns each package's pyproject.toml by distribution name."""
    files = [read_toml(package / "pyproject.toml") for package in packages]
    return {content["project"]["name"]: content for content in files}


@pytest.fixture(scope="module")
def pinned(projects: dict[str, Any]) -> dict[str, Requirement]:
    """Returns core's requirements by name."""
    found = map(Requirement, projects["vllm-davinci-core"]["project"]["dependencies"])
    return {requirement.name: requirement for requirement in found}


def oldest_of(requirement: Requirement) -> str:
    return min(s.version for s in requirement.specifier if s.operator in ("==", ">="))


def requirements(content: dict[str, Any]) -> list[Requirement]:
    """Returns all requirements of a package: to run, build and test it, and its extras."""
    project = content["project"]
    texts = [
        *project["dependencies"],
        *content["build-system"]["requires"],
        *(text for group in content.get("dependency-groups", {}).values() for text in group),
        *(text for extra in project.get("optional-dependencies", {}).values() for text in extra),
    ]
    return [Requirement(text) for text in texts]


def test_every_package_pins_the_releases_that_core_pins(projects, pinned):
    different = [
        f"{name}: {requirement}"
        for name, content in projects.items()
        # multistream needs only torch, and supports several releases.
        if name != "vllm-davinci-multistream"
        for requirement in requirements(content)
        if requirement.name in THIRD_PARTY
        and str(requirement) not in content["build-system"]["requires"]
        and requirement.specifier != pinned[requirement.name].specifier
    ]
    # Compiled code is for a single torch: pip builds with the default release, nox with the
    # environment's.
    defaults = {
        requirement
        for content in projects.values()
        for requirement in content["build-system"]["requires"]
        if requirement.startswith("torch")
    }
    assert defaults == {f"{name}=={oldest_of(pinned[name])}" for name in ("torch", "torch-npu")}
    assert not different


def test_our_packages_ask_for_each_other_in_the_versions_they_have(projects: dict[str, Any]):
    wrong = [
        f"{name}: {requirement}, which is {projects[requirement.name]['project']['version']}"
        for name, content in projects.items()
        for requirement in requirements(content)
        if requirement.name in projects
        and projects[requirement.name]["project"]["version"] not in requirement.specifier
    ]
    assert not wrong


def test_requirements_have_tested_ranges(projects: dict[str, Any]):
    """Third-party requirements have an upper limit and include constraints.txt's version."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^(?:# )?([a-z\d-]+)==(\S+)", text, re.MULTILINE))
    assert "://" not in text, "constraints.txt names a registry"
    unpinned = re.findall(r"^[a-z][^#]*==\S+$", text, re.MULTILINE)
    assert not unpinned, f"pip takes hashes for all files or for none: {unpinned}"
    wrong = [
        f"{name}: {requirement}, tested with {tested.get(canonicalize_name(requirement.name))}"
        for name, content in projects.items()
        for requirement in map(Requirement, content["project"]["dependencies"])
        if requirement.name not in projects
        and (
            not {"<", "=="} & {each.operator for each in requirement.specifier}
            or tested.get(canonicalize_name(requirement.name)) not in requirement.specifier
        )
    ]
    assert not wrong


def test_every_package_carries_the_licence(packages: list[Path]):
    for package in packages:
        for name in ("LICENSE", "NOTICE"):
            assert (package / name).read_bytes() == (ROOT / name).read_bytes(), package.name


def test_all_packages_run_on_the_same_pythons(projects: dict[str, Any]):
    ranges = {content["project"]["requires-python"] for content in projects.values()}
    oldest, newest = supported_versions.PYTHON_MINIMUM, supported_versions.PYTHON_MAXIMUM
    assert ranges == {f">=3.{oldest[1]},<3.{newest[1] + 1}"}


def test_the_check_at_start_accepts_only_versions_that_core_pins(pinned: dict[str, Requirement]):
    for requirement in supported_versions.REQUIREMENTS:
        specifier = pinned[canonicalize_name(requirement.distribution)].specifier
        assert requirement.version in specifier
        for version in (requirement.version, *requirement.others):
            assert version in specifier
            assert requirement.accepts(version)
        first, minor, *_ = map(int, requirement.version.split("."))
        accepted = {minor, *(int(other.split(".")[1]) for other in requirement.others)}
        for other in {min(accepted) - 1, max(accepted) + 1}:
            version = f"{first}.{other}.0"
            assert version not in specifier, f"{version} in {specifier}"
            assert not requirement.accepts(version)


def test_whatever_names_a_release_names_that_one(pinned: dict[str, Requirement]):
    allowed = {name: {oldest_of(pinned[name])} for name in THIRD_PARTY}
    for requirement in supported_versions.REQUIREMENTS:
        allowed[canonicalize_name(requirement.distribution)].update(requirement.others)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    different = []
    for name in listed:
        path = ROOT / name
        if name.startswith(OF_THEIR_OWN) or path.suffix not in SUFFIXES or not path.is_file():
            continue
        text = STAMP.sub("", path.read_text(encoding="utf-8"))
        for distribution, version in NAMED.findall(text):
            releases = allowed[canonicalize_name(distribution)]
            if version not in {*releases, *(each.rpartition(".")[0] for each in releases)}:
                different.append(f"{name}: {distribution} {version}, not of {sorted(releases)}")
    assert not different


def test_no_message_spells_out_a_release_of_ours(packages: list[Path]):
    """`vllm_davinci.core.errors.RELEASE` reads the release from the installed metadata."""
    spelled = [
        f"{source.relative_to(ROOT)}: {found}"
        for package in packages
        for source in package.glob("src/**/*.py")
        for found in re.findall(r"vllm-davinci(?:-\w+)? \d+\.\d+", source.read_text("utf-8"))
    ]
    assert not spelled


def test_the_requirements_for_npus_are_the_pinned_releases_and_our_packages(packages, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    versions = import_module("versions")
    text = (ROOT / "requirements-npu.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pinned = {
        each.name: str(each.specifier)
        for each in map(Requirement, (line for line in lines if line[0] not in ".-"))
    }
    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (triton,) = re.findall(r"^triton==(\S+)", lock, re.MULTILINE)
    assert triton in Requirement(f"triton{pinned.pop('triton')}").specifier
    assert pinned == {
        "torch": f"=={versions.TORCH_VERSION}",
        "torch-npu": f"=={versions.TORCH_NPU_VERSION}",
        "vllm": f"=={versions.VLLM_VERSION}",
    }
    # The index has vLLM's wheel for CUDA, and pip may have cached one.
    assert "--no-binary vllm" in lines
    local = {ROOT / line for line in lines if line.startswith("./")}
    assert local == {package for package in packages if package.name != "vnpu"}
    command = (
        f"VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={versions.VLLM_VERSION} "
        "pip install --no-cache-dir -r requirements-npu.txt"
    )
    assert command in text
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
