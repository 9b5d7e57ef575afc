"""Creates or updates the nox sessions' shared environment.

Run by `noxfile.py`; on its own: `python ci/prepare_environment.py --directory DIR`. Real torch,
torch_npu and vLLM come from the package index, compiled packages from the wheel cache, pure Python
packages editable from this checkout. C++ is compiled while wheels are downloaded and installed.
Without changes, a second run installs nothing.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from pathlib import Path

import versions
import wheel_cache
from builds_beside import builds_beside, run_beside
from installer import Installer, locked_requirements, options_without_build
from progress import StepFailedError, Steps, exit_status
from versions import ROOT, read_toml

# Core-seconds to create an environment without caches, on a processor without AVX-512.
NEW_ENVIRONMENT_CORE_S = 600
# A file in the environment that lists what was installed and marks the directory as replaceable.
STAMP = "installed.json"
# Sorted by dependence: a package comes after its requirements.
PACKAGES = (
    *("multistream", "operators", "vnpu", "kernels", "core", "models", "meta", "planner", "verify"),
)
# Imports an engine's modules on the CPU while C++ is compiled: this writes bytecode and fills the
# disk cache. Failures are ignored, because they recur later with a message.
IMPORTS = """
import importlib
for name in (
    "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.model_executor.models",
    "vllm.model_executor.models.deepseek_v2", "vllm.model_executor.models.llama",
    "transformers.models.auto.tokenization_auto", "torch._dynamo", "torch._inductor.config",
):
    try:
        importlib.import_module(name)
    except Exception as error:
        print(name, repr(error))
"""
IMPORT_ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_PLUGINS": "", "PYTHONDONTWRITEBYTECODE": "",
}  # fmt: skip
# The tests' support code is installed like a package and never released.
TEST_SUPPORT = ROOT / "tests" / "support"


def present_packages() -> list[Path]:
    """Returns this checkout's packages, sorted by dependence."""
    found = (ROOT / "packages" / name for name in PACKAGES)
    return [package for package in found if (package / "pyproject.toml").is_file()]


def installed_projects() -> list[Path]:
    """Returns the directories that an environment installs: packages, then the tests' support
    code.
    """
    return [*present_packages(), TEST_SUPPORT]


def third_party_requirements(groups: list[str]) -> list[str]:
    """Returns the root's dependency groups as pip requirements."""
    known = read_toml(ROOT / "pyproject.toml")["dependency-groups"]
    return [requirement for group in groups for requirement in known[group]]


def own_requirements() -> list[str]:
    """Returns the packages' requirements, except vLLM, torch and each other."""
    needed: set[str] = set()
    for project in installed_projects():
        needed.update(read_toml(project / "pyproject.toml")["project"].get("dependencies", []))
    return sorted(name for name in needed if not name.startswith(("vllm", "torch")))


def requirements_fingerprint(vllm_version: str) -> str:
    """Hashes everything that requires a new environment when it changes."""
    digest = hashlib.sha256()
    for fact in (
        sys.version,
        versions.TORCH_VERSION,
        versions.TORCH_NPU_VERSION,
        vllm_version,
        *wheel_cache.BUILD_REQUIREMENTS,
    ):
        digest.update(f"{fact}\0".encode())
    return digest.hexdigest()[:16]


def package_fingerprint(package: Path, editable: bool) -> str:
    """Hashes everything that requires reinstalling this package when it changes."""
    if wheel_cache.is_compiled(package):
        return f"{'editable' if editable else 'wheel'}-{wheel_cache.compiled_package_key(package)}"
    metadata = hashlib.sha256((package / "pyproject.toml").read_bytes())
    for path in sorted(package.glob("src/*.pth")):
        metadata.update(path.read_bytes())
    return metadata.hexdigest()[:16]


def prepare(
    directory: Path, *, groups: list[str], editable: bool, vllm_version: str = versions.VLLM_VERSION
) -> None:
    """Updates the environment in `directory` to this checkout.

    groups: the root's dependency groups to install
    editable: True if compiled packages are editable, too, for their developers
    vllm_version: a version other than the default ignores the packages' requirements
    """
    python = directory / "bin" / "python"
    stamp_path = directory / STAMP
    if directory.exists() and not stamp_path.exists():
        raise StepFailedError(
            f"{directory} exists and was not made by this task: rename or remove it, then run "
            "the task again."
        )
    wanted = requirements_fingerprint(vllm_version)
    # The demo needs no test requirements.
    projects = installed_projects() if "test" in groups else present_packages()
    fingerprints = {project.name: package_fingerprint(project, editable) for project in projects}
    installed = _read_stamp(stamp_path) if python.exists() else {}
    is_new = installed.get("requirements") != wanted
    if is_new:
        installed = {}
    stale = [
        project for project in projects if installed.get(project.name) != fingerprints[project.name]
    ]
    tools = installed.get("tools", "").split("\n")
    missing = [each for each in third_party_requirements(groups) if each not in tools]
    if not stale and not missing and not is_new:
        return

    compiled = [project for project in stale if wheel_cache.is_compiled(project)]
    plain = [project for project in stale if project not in compiled]
    count = (5 if is_new else bool(missing)) + bool(plain) + len(compiled)
    steps = Steps(count, directory.parent / f"{directory.name}-logs")
    if is_new:
        _say_how_long(compiled)
        _create(directory, python, steps)
    installer = Installer(python, steps)
    if is_new:
        steps.start("the build tools")
        installer.find_uv()
        installer.install(*wheel_cache.BUILD_REQUIREMENTS)
    else:
        installer.find_uv()
    with builds_beside(() if editable else compiled, python, steps.log_directory) as builds:
        if is_new:
            builds.begin_without_torch()
            _install_torch(installer, steps)
        builds.begin()
        if is_new:
            _install_vllm(python, installer, missing, vllm_version, steps)
            installed["requirements"] = wanted
        elif missing:
            steps.start(f"tools: {', '.join(groups)}")
            # Otherwise one of them may install a newer torch.
            installer.install(*missing, *_pinned_torch())
        installed["tools"] = "\n".join(sorted({*filter(None, tools), *missing}))
        _write_stamp(stamp_path, installed)
        if plain:
            steps.start(f"packages/: {', '.join(package.name for package in plain)}")
            if not is_new and vllm_version == versions.VLLM_VERSION:
                installer.install(*own_requirements())
            installer.install(*options_without_build(plain))
            installed.update({package.name: fingerprints[package.name] for package in plain})
            _write_stamp(stamp_path, installed)
        # Compiled packages come last, because their build runs while the others are installed.
        with run_beside([python, "-c", IMPORTS], IMPORT_ENVIRONMENT, steps.log_directory, is_new):
            for package in compiled:
                steps.start(str(package.relative_to(ROOT)))
                if editable:
                    _install_editable(package, python, installer, steps)
                else:
                    wheel = builds.wheels[package.name].result()
                    installer.install("--force-reinstall", "--no-deps", wheel)
                installed[package.name] = fingerprints[package.name]
                _write_stamp(stamp_path, installed)
    print(f"environment ready: source {directory}/bin/activate", flush=True)


def _say_how_long(compiled: list[Path]) -> None:
    cores = len(os.sched_getaffinity(0))
    built = " and ".join(package.name for package in compiled)
    print(
        "A new environment: torch, vLLM and their requirements come from the package index (0.6 "
        f"GB; more with torch for CUDA), and the C++ of {built} is compiled here, unless it is "
        f"in the wheel cache: about {NEW_ENVIRONMENT_CORE_S / cores / 60:.0f} minutes on {cores} "
        "cores.",
        flush=True,
    )


def _create(directory: Path, python: Path, steps: Steps) -> None:
    """Creates an environment with pip only."""
    steps.start(f"new environment in {directory}")
    if directory.exists():
        shutil.rmtree(directory)
    steps.run([sys.executable, "-m", "virtualenv", directory], limit_s=120)
    _write_stamp(directory / STAMP, {})


def _pinned_torch() -> tuple[str, str]:
    return f"torch=={versions.TORCH_VERSION}", f"torch-npu=={versions.TORCH_NPU_VERSION}"


def _install_torch(installer: Installer, steps: Steps) -> None:
    steps.start(f"torch {versions.TORCH_VERSION}, torch_npu {versions.TORCH_NPU_VERSION}")
    installer.install_torch(*_pinned_torch())


def _install_vllm(
    python: Path, installer: Installer, tools: list[str], vllm_version: str, steps: Steps
) -> None:
    """Installs vLLM, requirements of vLLM and of our packages, and tools; keeps torch and
    torch_npu.

    Uses the lock's files if they are for this Python and processor, else the newest that fit.
    """
    steps.start("requirements of vLLM and of our packages, tools")
    running = ".".join(map(str, sys.version_info[:2]))
    lock = locked_requirements(ROOT / "constraints.txt", running, platform.machine())
    is_locked = False
    is_default = versions.OTHER_TORCH not in os.environ and vllm_version == versions.VLLM_VERSION
    if lock is not None and is_default:
        try:
            installer.install("--no-deps", "--require-hashes", "-r", lock)
            is_locked = True
        except StepFailedError:
            steps.note(
                f"the files of {lock.name} are not available: installing the newest that fit"
            )
    if is_locked and tools:
        installer.install(*tools, *_pinned_torch())

    steps.start(f"vLLM {vllm_version} for the target `empty`")
    vllm_wheel = wheel_cache.vllm_wheel(python, steps, vllm_version)
    if is_locked:
        installer.install("--no-deps", vllm_wheel)
    else:
        installer.install(vllm_wheel, *_pinned_torch(), *tools, *own_requirements())


def _install_editable(package: Path, python: Path, installer: Installer, steps: Steps) -> None:
    """Installs a compiled package of this checkout editable, for its developers."""
    options = _editable_options(package, python, installer, steps)
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    steps.run(
        [*pip, "install", "-v", "--no-build-isolation", "--no-deps", *options, "-e", package],
        environment=wheel_cache.build_environment(python),
    )


def _editable_options(package: Path, python: Path, installer: Installer, steps: Steps) -> list[str]:
    """Returns options of an editable build: compile, or reuse a wheel of the same sources."""
    build_directory = ROOT / "build" / f"editable-{package.name}-{python.parent.parent.name}"
    wheel = wheel_cache.kept_wheel(package)
    if wheel is None:
        return [f"-Cbuild-dir={build_directory}"]
    steps.note(f"compiled files from the wheel cache: {wheel.name}")
    unpacked = build_directory.with_name(f"{build_directory.name}-unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    installer.install("--no-deps", "--target", unpacked, wheel)
    compiled = unpacked / "vllm_davinci" / package.name
    # Uses a folder of its own, so that the compiling build remains incremental.
    return [
        f"-Cbuild-dir={build_directory.with_name(f'{build_directory.name}-prebuilt')}",
        f"-Ccmake.define.PREBUILT={compiled}",
    ]


def _read_stamp(path: Path) -> dict[str, str]:
    """Reads fingerprints of the requirements and of each installed package, by name."""
    try:
        stamp: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return stamp


def _write_stamp(path: Path, installed: dict[str, str]) -> None:
    path.write_text(json.dumps(installed, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--group", action="append", default=[], help="dependency group to add")
    parser.add_argument("--editable", action="store_true", help="also compiled packages editable")
    parser.add_argument("--vllm", default=versions.VLLM_VERSION, help="version of vLLM")
    arguments = parser.parse_args()
    oldest, newest = versions.OLDEST_PYTHON, versions.NEWEST_PYTHON
    if not oldest <= sys.version_info[:2] <= newest:
        print(
            f"Python {sys.version.split()[0]} at {sys.executable} is not supported: torch_npu "
            f"{versions.TORCH_NPU_VERSION} has wheels for Python {'.'.join(map(str, oldest))} to "
            f"{'.'.join(map(str, newest))}. Run nox with one of those, for example: "
            "python3.11 -m nox",
            file=sys.stderr,
        )
        return 1
    directory = arguments.directory.resolve()
    lock = directory.parent / f"{directory.name}.lock"
    groups, editable = arguments.group, arguments.editable

    def work() -> None:
        with wheel_cache.locked(lock, f"another session that prepares {directory}"):
            prepare(directory, groups=groups, editable=editable, vllm_version=arguments.vllm)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
