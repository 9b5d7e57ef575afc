"""No package owns `vllm_davinci`: each adds a folder, and none adds an `__init__.py`."""

import importlib.metadata
import sys
from importlib import import_module
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import run_to_end

LIMIT_S = 240


@pytest.fixture(scope="module")
def verify_wheels(repository: Path):
    sys.path.insert(0, str(repository / "ci"))
    try:
        return import_module("verify_wheels")
    finally:
        sys.path.remove(str(repository / "ci"))


@pytest.fixture(scope="module")
def files_by_distribution(packages, verify_wheels, tmp_path_factory) -> dict[str, list[str]]:
    """Lists the files that each package's wheel installs.

    Builds pure-Python wheels; for a compiled package, reads the installed files, or the sources of
    an editable install.
    """
    directory = tmp_path_factory.mktemp("wheels")
    files: dict[str, list[str]] = {}
    for package in packages:
        if (package / "CMakeLists.txt").exists():
            files[package.name] = compiled_package_files(package, verify_wheels)
            continue
        target = directory / package.name
        done = run_to_end(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "-q",
                "--no-deps",
                "--no-build-isolation",
                "-w",
                str(target),
                str(package),
            ],
            LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = target.glob("*.whl")
        files[package.name] = verify_wheels.wheel_files(wheel)
        assert not verify_wheels.wheel_problems(wheel)
    return files


def compiled_package_files(package: Path, verify_wheels) -> list[str]:
    distribution = importlib.metadata.distribution(f"vllm-davinci-{package.name}")
    names = verify_wheels.installed_files(str(path) for path in distribution.files or [])
    names = [name for name in names if not name.startswith((".", "__pycache__"))]
    if any(name.startswith(f"vllm_davinci/{package.name}/__init__.py") for name in names):
        return names
    sources = package / "src"
    return [str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()]


def test_no_wheel_closes_the_namespace_and_no_file_has_two_owners(
    files_by_distribution, verify_wheels
):
    assert verify_wheels.problems(files_by_distribution) == []


def test_every_wheel_fills_its_own_part_of_the_namespace_only(files_by_distribution):
    for package, names in files_by_distribution.items():
        parts = {name.split("/")[1] for name in names if name.startswith("vllm_davinci/")}
        assert parts == {package}


def test_a_closed_namespace_and_a_shared_file_are_found(verify_wheels):
    found = verify_wheels.problems(
        {
            "one": ["vllm_davinci/__init__.py", "vllm_davinci/one/py.typed"],
            "two": ["vllm_davinci/one/py.typed"],
        }
    )
    assert len(found) == 2
    assert "one holds vllm_davinci/__init__.py" in found[0]
    assert "owned by one and two" in found[1]


def test_the_namespace_is_open_here():
    import vllm_davinci

    assert getattr(vllm_davinci, "__file__", None) is None
