"""Runs each package's tests in an environment with the package and its declared requirements.

Run by `nox -s isolated`. The package's wheel is installed with the requirements in its metadata and
in the dependency group `test` of its pyproject.toml, and nothing else: this finds missing
declarations, and files missing in the wheel.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import wheel_cache
from prepare_environment import installed_projects, present_packages
from progress import StepFailedError, Steps, wait_for_all
from versions import ROOT, TORCH_VERSION, read_toml

SCRATCH = ROOT / ".nox" / "isolated"
TESTS_LIMIT_S = 3600.0
# Requirements of the root's pytest configuration, and of all tests.
TEST_RUNNER = ("pytest>=9,<10", "pytest-timeout>=2.4", "vllm-davinci-testing")


def build_own_wheels(directory: Path, steps: Steps) -> None:
    """Builds a wheel of each of this checkout's projects in `directory`."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    python = Path(sys.executable)
    for package in installed_projects():
        if wheel_cache.is_compiled(package):
            shutil.copy(wheel_cache.compiled_wheel(package, python, steps), directory)
        else:
            pip: list[str | Path] = [
                python,
                "-m",
                "pip",
                "wheel",
                "--no-deps",
                "--no-build-isolation",
            ]
            steps.run([*pip, "-w", directory, package])


def sources(wheels: Path, vllm_wheel: Path) -> list[str]:
    """Returns constraints with which pip installs our packages from this checkout's wheels.

    The other two lines prevent vLLM's wheel for CUDA and the newest torch.
    """
    ours = [
        f"{wheel.name.split('-')[0].replace('_', '-')} @ {wheel.as_uri()}"
        for wheel in sorted(wheels.glob("*.whl"))
    ]
    return [*ours, f"vllm @ {vllm_wheel.as_uri()}", f"torch=={TORCH_VERSION}"]


def distribution_and_test_requirements(package: Path) -> tuple[str, list[str]]:
    """Returns the name of a package's distribution, and its tests' requirements."""
    content = read_toml(package / "pyproject.toml")
    project = content["project"]
    return project["name"], [
        *content.get("dependency-groups", {}).get("test", []),
        *project.get("optional-dependencies", {}).get("test", []),
    ]


def run_tests(package: Path, constraints: Path, steps: Steps) -> bool:
    """Installs a package with its requirements and runs its tests. Returns True if they passed."""
    directory = SCRATCH / package.name
    shutil.rmtree(directory, ignore_errors=True)
    steps.start(f"packages/{package.name}: install")
    steps.run([sys.executable, "-m", "virtualenv", directory], limit_s=120)
    distribution, test_requirements = distribution_and_test_requirements(package)
    python = directory / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--constraint", constraints]
    steps.run([*pip, distribution, *test_requirements, *TEST_RUNNER])
    steps.start(f"packages/{package.name}: tests")
    vnpu = directory / "bin" / "vnpu"
    command: list[str | Path] = [vnpu, "run", "--"] if vnpu.exists() else []
    command += [python, "-m", "pytest", "-c", ROOT / "pyproject.toml", f"--rootdir={ROOT}"]
    command += ["-p", "no:cacheprovider", package / "tests"]
    passed = run_outside_checkout(command, directory, TESTS_LIMIT_S)
    shutil.rmtree(directory)
    return passed


def run_outside_checkout(command: list[str | Path], directory: Path, limit_s: float) -> bool:
    """Returns True if a command succeeds in `directory`, where imports do not find the checkout.

    Raises StepFailedError after the time limit.
    """
    process = subprocess.Popen(
        [str(part) for part in command], cwd=directory, start_new_session=True
    )
    status = wait_for_all(process, limit_s)
    if status is None:
        raise StepFailedError(f"the tests did not end within {limit_s:.0f} s")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="packages to test; default: all")
    names = parser.parse_args().names
    packages = [package for package in present_packages() if not names or package.name in names]
    if unknown := set(names) - {package.name for package in packages}:
        print(f"no such package: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    steps = Steps(1 + 2 * len(packages), SCRATCH / "logs")
    try:
        steps.start("wheels of every package")
        wheels = SCRATCH / "wheels"
        build_own_wheels(wheels, steps)
        vllm_wheel = wheel_cache.vllm_wheel(Path(sys.executable), steps)
        constraints = SCRATCH / "constraints.txt"
        constraints.write_text("\n".join(sources(wheels, vllm_wheel)) + "\n", encoding="utf-8")
        passed = {package.name: run_tests(package, constraints, steps) for package in packages}
    except StepFailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    for name, has_passed in passed.items():
        print(f"{name}: {'passed' if has_passed else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
