"""Makes the environment that the nox sessions share, or brings an existing one up to date.

Run by `noxfile.py`; on its own: `python ci/prepare_environment.py --directory DIR`.
Real torch, torch_npu and vLLM come from the package index, compiled packages from the wheel
cache, pure Python packages editable from this checkout. A second run that finds nothing changed
installs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

import versions
import wheel_cache
from builds_beside import builds_beside
from progress import StepFailedError, Steps
from versions import ROOT, read_toml

# In the environment's directory: what was installed, and that the directory is ours to replace.
STAMP = "installed.json"
# In order of dependence: what a package needs stands before it.
PACKAGES = ("multistream", "vnpu", "kernels", "core", "models", "meta")
# What their tests share: a distribution that is installed beside them and never released.
TEST_SUPPORT = ROOT / "tests" / "support"


def present_packages() -> list[Path]:
    """The packages of this checkout, in order of dependence."""
    found = (ROOT / "packages" / name for name in PACKAGES)
    return [package for package in found if (package / "pyproject.toml").is_file()]


def installed_projects() -> list[Path]:
    """Directories that an environment installs: the packages, then what their tests share."""
    return [*present_packages(), TEST_SUPPORT]


def third_party_requirements(groups: list[str]) -> list[str]:
    """The root's dependency groups, as pip takes them."""
    known = read_toml(ROOT / "pyproject.toml")["dependency-groups"]
    return [requirement for group in groups for requirement in known[group]]


def own_requirements() -> list[str]:
    """Requirements of the packages, but for vLLM, torch and each other."""
    needed: set[str] = set()
    for project in installed_projects():
        needed.update(read_toml(project / "pyproject.toml")["project"].get("dependencies", []))
    return sorted(name for name in needed if not name.startswith(("vllm", "torch")))


def requirements_fingerprint(vllm_version: str) -> str:
    """Hash of everything whose change means a new environment."""
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
    """Hash of everything whose change means installing this package again."""
    if wheel_cache.is_compiled(package):
        return f"{'editable' if editable else 'wheel'}-{wheel_cache.compiled_package_key(package)}"
    metadata = hashlib.sha256((package / "pyproject.toml").read_bytes())
    for path in sorted(package.glob("src/*.pth")):
        metadata.update(path.read_bytes())
    return metadata.hexdigest()[:16]


def prepare(
    directory: Path,
    *,
    groups: list[str],
    editable: bool,
    vllm_version: str = versions.VLLM_VERSION,
) -> None:
    """Bring the environment in `directory` up to date with this checkout.

    groups: the root's dependency groups to install beside the packages
    editable: install the compiled packages editable too, for those who change them
    vllm_version: another one is installed against the packages' own requirements
    """
    python = directory / "bin" / "python"
    stamp_path = directory / STAMP
    if directory.exists() and not stamp_path.exists():
        raise StepFailedError(
            f"{directory} exists and was not made by this task, so it is left alone: rename or "
            "remove it, then run the task again."
        )
    wanted = requirements_fingerprint(vllm_version)
    # A demonstration needs nothing of the tests.
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

    count = (4 if is_new else bool(missing)) + len(stale)
    steps = Steps(count, directory.parent / f"{directory.name}-logs")
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
    if is_new:
        _create(directory, python, pip, steps)
    with builds_beside(() if editable else stale, python, steps.log_directory) as builds:
        if is_new:
            _install_vllm(python, pip, missing, vllm_version, steps)
            installed["requirements"] = wanted
        elif missing:
            steps.start(f"tools: {', '.join(groups)}")
            steps.run([*pip, "install", *missing])
        installed["tools"] = "\n".join(sorted({*filter(None, tools), *missing}))
        _write_stamp(stamp_path, installed)
        # Compiled packages last: what they are built from is ready when the others are installed.
        for package in sorted(stale, key=lambda each: each.name in builds):
            steps.start(str(package.relative_to(ROOT)))
            alone: list[str | Path] = [] if vllm_version == versions.VLLM_VERSION else ["--no-deps"]
            wheel = builds[package.name].result() if package.name in builds else None
            _install(package, python, pip, alone, wheel, steps)
            installed[package.name] = fingerprints[package.name]
            _write_stamp(stamp_path, installed)
    print(f"environment ready: source {directory}/bin/activate", flush=True)


def _create(directory: Path, python: Path, pip: list[str | Path], steps: Steps) -> None:
    """An environment with what the C++ builds need, and nothing more."""
    steps.start(f"new environment in {directory}")
    if directory.exists():
        shutil.rmtree(directory)
    steps.run([sys.executable, "-m", "virtualenv", directory], limit_s=120)
    _write_stamp(directory / STAMP, {})

    steps.start(
        f"torch {versions.TORCH_VERSION}, torch_npu {versions.TORCH_NPU_VERSION}, the build tools"
    )
    steps.run(
        [
            *pip,
            "install",
            f"torch=={versions.TORCH_VERSION}",
            f"torch-npu=={versions.TORCH_NPU_VERSION}",
            *wheel_cache.BUILD_REQUIREMENTS,
        ],
    )


def _install_vllm(
    python: Path, pip: list[str | Path], tools: list[str], vllm_version: str, steps: Steps
) -> None:
    """vLLM, its requirements and the tools; torch and torch_npu stay as they are."""
    steps.start(f"vLLM {vllm_version} for the target `empty`")
    vllm_wheel = wheel_cache.vllm_wheel(python, steps, vllm_version)

    steps.start("vLLM's requirements, tools")
    steps.run(
        [
            *pip,
            "install",
            vllm_wheel,
            f"torch=={versions.TORCH_VERSION}",
            f"torch-npu=={versions.TORCH_NPU_VERSION}",
            *tools,
            *(own_requirements() if vllm_version != versions.VLLM_VERSION else ()),
        ],
    )


def _install(
    package: Path,
    python: Path,
    pip: list[str | Path],
    alone: list[str | Path],
    wheel: Path | None,
    steps: Steps,
) -> None:
    """Installs a package of this checkout.

    alone: options that leave its requirements out, or none
    wheel: of a compiled package that is not installed editable
    """
    if not wheel_cache.is_compiled(package):
        steps.run(
            [*pip, "install", "--no-build-isolation", *alone, "-e", package],
        )
    elif wheel is None:
        options = _editable_options(package, python, pip, steps)
        steps.run(
            [*pip, "install", "-v", "--no-build-isolation", *options, "-e", package],
            environment=wheel_cache.build_environment(python),
        )
    else:
        steps.run([*pip, "install", "--force-reinstall", "--no-deps", wheel])
        steps.run([*pip, "install", *alone, wheel])


def _editable_options(
    package: Path, python: Path, pip: list[str | Path], steps: Steps
) -> list[str]:
    """Options of an editable build: compile, or take what a wheel of the same sources holds."""
    build_directory = ROOT / "build" / f"editable-{package.name}-{python.parent.parent.name}"
    wheel = wheel_cache.kept_wheel(package)
    if wheel is None:
        return [f"-Cbuild-dir={build_directory}"]
    steps.note(f"compiled files from the wheel cache: {wheel.name}")
    unpacked = build_directory.with_name(f"{build_directory.name}-unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)
    steps.run([*pip, "install", "--no-deps", "--target", unpacked, wheel])
    compiled = unpacked / "vllm_davinci" / package.name
    # A folder of its own: the build that compiles goes on where it was.
    return [
        f"-Cbuild-dir={build_directory.with_name(f'{build_directory.name}-prebuilt')}",
        f"-Ccmake.define.PREBUILT={compiled}",
    ]


def _read_stamp(path: Path) -> dict[str, str]:
    """Fingerprint of the requirements and of each installed package, by name."""
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
    parser.add_argument("--editable", action="store_true", help="compiled packages editable too")
    parser.add_argument("--vllm", default=versions.VLLM_VERSION, help="another version of vLLM")
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
    try:
        with wheel_cache.locked(lock, f"another session that prepares {directory}"):
            prepare(
                directory,
                groups=arguments.group,
                editable=arguments.editable,
                vllm_version=arguments.vllm,
            )
    except StepFailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
