"""Builds and caches wheels that take long to build, once per machine.

vLLM has no wheel for machines without its built-in devices, so its sdist is built for the target
`empty`; our compiled packages are built from this checkout. Each wheel is in a folder named by a
hash of its inputs, so a second environment only copies it.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from progress import StepFailedError, Steps
from versions import OTHER_TORCH, ROOT, TORCH_NPU_VERSION, TORCH_VERSION, VLLM_VERSION

# Build requirements of vLLM and our packages, preinstalled because an isolated build would download
# torch again.
BUILD_REQUIREMENTS = (
    "cmake>=3.26",
    "editables>=0.5",
    "hatchling>=1.27",
    "jinja2",
    "ninja>=1.11",
    "packaging>=24.2",
    "pybind11>=3.0",
    "scikit-build-core>=1.1",
    "setuptools>=77,<81",
    "setuptools-rust>=1.9",
    "setuptools-scm>=8",
    "wheel",
)
# Time to wait for another session's build, on a busy machine.
LOCK_LIMIT_S = 4 * 3600.0
# Peak memory of a translation unit with torch's headers (measured with g++ 12).
BYTES_PER_COMPILER = 2 << 30
# Names that do not affect a wheel's code.
_NOT_SOURCES = {"tests", "build", "dist", "__pycache__", "CHANGELOG.md", "README.md"}


def cache_directory() -> Path:
    """Returns DAVINCI_WHEEL_CACHE, or ~/.cache/vllm-davinci/wheels."""
    chosen = os.environ.get("DAVINCI_WHEEL_CACHE")
    path = Path(chosen) if chosen else Path.home() / ".cache" / "vllm-davinci" / "wheels"
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def is_compiled(package: Path) -> bool:
    return (package / "CMakeLists.txt").is_file()


def compiled_package_key(package: Path) -> str:
    """Hashes a compiled package's sources, its build requirements, and the Python."""
    digest = hashlib.sha256()
    place = sys.implementation.cache_tag, platform.machine()
    for fact in (TORCH_VERSION, TORCH_NPU_VERSION, *place):
        digest.update(f"{fact}\0".encode())
    for path in sorted(package.rglob("*")):
        relative = path.relative_to(package)
        if path.is_file() and not _NOT_SOURCES & set(relative.parts):
            digest.update(f"{relative.as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _wheel(python: Path) -> list[str | Path]:
    return [python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]


def vllm_wheel(python: Path, steps: Steps, version: str = VLLM_VERSION) -> Path:
    """Returns vLLM's wheel for the target `empty`, from the cache or built with `python`."""
    key = f"vllm-{version}-{sys.implementation.cache_tag}-{platform.machine()}"
    return _cached(
        key,
        [*_wheel(python), "--no-cache-dir", "--no-binary", "vllm", f"vllm=={version}"],
        {
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": version,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # Metadata and wheel are built in two processes; both import torch.
            "PYTHONDONTWRITEBYTECODE": "",
        },
        steps,
    )


def compiled_wheel(package: Path, python: Path, steps: Steps) -> Path:
    """Returns a compiled package's wheel, from the cache or built with `python`.

    Raises StepFailedError if the wheel has no module `_C`.
    """
    # The build without torch has left this option in the folder's CMake cache.
    options = ["-Ccmake.define.WITHOUT_TORCH=OFF"] if has_part_without_torch(package) else []
    wheel = _cached(
        _key(package),
        [*_wheel(python), "-v", f"-Cbuild-dir={build_directory(package)}", *options, package],
        build_environment(python),
        steps,
    )
    with zipfile.ZipFile(wheel) as contents:
        if not any(PurePath(name).match("_C*.so") for name in contents.namelist()):
            raise StepFailedError(f"{wheel} has no module _C. Remove the file, and run this again.")
    return wheel


def compile_without_torch(package: Path, python: Path, steps: Steps) -> None:
    """Compiles a package's code without torch's headers, in its wheel's build folder.

    Does nothing if the wheel is cached or there is no such code. Errors are ignored, because the
    wheel's own build reports them better.
    """
    if kept_wheel(package) is not None or not has_part_without_torch(package):
        return
    environment = build_environment(python)
    options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DWITHOUT_TORCH=ON")
    directory = build_directory(package)
    commands: tuple[list[str | Path], ...] = (
        ["cmake", "-S", package, "-B", directory, *options, f"-DPython_EXECUTABLE={python}"],
        ["cmake", "--build", directory],
    )
    with contextlib.suppress(StepFailedError):
        for command in commands:
            steps.run(command, environment=environment)


def has_part_without_torch(package: Path) -> bool:
    text = (package / "CMakeLists.txt").read_text(encoding="utf-8")
    return "option(WITHOUT_TORCH " in text


def build_directory(package: Path) -> Path:
    other = f"-torch-{os.environ[OTHER_TORCH]}" if OTHER_TORCH in os.environ else ""
    return ROOT / "build" / f"wheel-{package.name}-{sys.implementation.cache_tag}{other}"


def kept_wheel(package: Path) -> Path | None:
    """Returns the cached wheel of the same sources, or None."""
    return next(iter(sorted((cache_directory() / _key(package)).glob("*.whl"))), None)


def _key(package: Path) -> str:
    return f"{package.name}-{compiled_package_key(package)}"


def build_environment(python: Path) -> dict[str, str]:
    """Returns variables for a C++ build with the tools installed beside `python`."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(os.cpu_count() or 1, memory_bytes // BYTES_PER_COMPILER))
    variables = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(jobs)),
    }
    if ccache := shutil.which("ccache"):
        variables["CMAKE_CXX_COMPILER_LAUNCHER"] = ccache
        # Otherwise ccache skips every file that uses a precompiled header.
        variables["CCACHE_SLOPPINESS"] = os.environ.get(
            "CCACHE_SLOPPINESS", "pch_defines,time_macros,include_file_mtime,include_file_ctime"
        )
    return variables


def _cached(key: str, command: list[str | Path], environment: dict[str, str], steps: Steps) -> Path:
    directory = cache_directory() / key
    with locked(directory.with_suffix(".lock"), f"another build of {key}"):
        if found := sorted(directory.glob("*.whl")):
            steps.note(f"from the wheel cache: {found[0].name}")
            return found[0]
        with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            steps.run([*command, "--wheel-dir", scratch], environment=environment)
            built = sorted(Path(scratch).glob("*.whl"))
            if len(built) != 1:
                raise StepFailedError(f"expected one wheel for {key}, the build left {built}")
            directory.mkdir(exist_ok=True)
            return Path(shutil.move(built[0], directory / built[0].name))


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds an exclusive lock on `path`; waits up to LOCK_LIMIT_S for `what` to finish."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        began_s = told_s = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now_s = time.monotonic()
                if now_s > began_s + LOCK_LIMIT_S:
                    raise StepFailedError(
                        f"waited {LOCK_LIMIT_S:.0f} s for {what} (lock file {path})"
                    ) from None
                if now_s >= told_s:
                    print(f"          waiting for {what}: {now_s - began_s:.0f} s", flush=True)
                    told_s = now_s + 60
                time.sleep(0.5)
        yield
