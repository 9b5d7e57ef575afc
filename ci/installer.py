"""Installs packages into an environment with uv, which downloads in parallel, or with pip.

Uses the machine's uv, or installs it into the environment; if there is no uv, or it fails, uses
pip. Both use pip's configured index, further indexes and folders of files.
"""

import ast
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from progress import StepFailedError, Steps

UV_LIMIT_S = 300.0
# pip's options with other names in uv, by uv's name.
_UV_NAMES = {"--force-reinstall": "--reinstall"}


class Installer:
    """Runs `install` commands in the environment of `python`.

    python: the environment's interpreter, with pip
    """

    def __init__(self, python: Path, steps: Steps) -> None:
        self._python = python
        self._steps = steps
        self._sources = _configured_sources(python)
        self._uv: Path | None = None

    def find_uv(self) -> None:
        """Finds uv, or installs it into the environment."""
        beside = self._python.parent / "uv"
        if not beside.exists() and shutil.which("uv") is None:
            try:
                self._steps.run(
                    [*self._pip(), "install", "--only-binary", "uv", "uv>=0.9"], limit_s=UV_LIMIT_S
                )
            except StepFailedError:
                self._steps.note("uv is not available here: pip is used, which takes longer")
        found = beside if beside.exists() else shutil.which("uv")
        self._uv = Path(found) if found else None

    def install(self, *arguments: str | Path, limit_s: float | None = None) -> None:
        """Installs with pip's requirements and options; raises StepFailedError."""
        if self._uv is not None:
            try:
                self._run_uv(arguments, limit_s)
            except StepFailedError:
                self._steps.note(f"uv failed ({self._steps.log_path}): trying pip")
            else:
                return
        self._steps.run([*self._pip(), "install", *arguments], limit_s=limit_s)

    def install_torch(self, *requirements: str) -> None:
        """Installs torch and packages compiled against it.

        The index's torch is for CUDA, with gigabytes of libraries, so uv uses PyTorch's CPU build
        unless pip is configured for another source.
        """
        for_cpu = ["--torch-backend=cpu"] if self._uv is not None and not self._sources else []
        if for_cpu:
            try:
                self._run_uv([*for_cpu, *requirements])
            except StepFailedError:
                self._steps.note(
                    "PyTorch's builds for the CPU are not available: installing the index's torch"
                )
            else:
                return
        self.install(*requirements)

    def _run_uv(self, arguments: Sequence[str | Path], limit_s: float | None = None) -> None:
        assert self._uv is not None
        options = [_UV_NAMES.get(str(each), each) for each in arguments]
        command: list[str | Path] = [self._uv, "pip", "install", "--python", self._python]
        self._steps.run([*command, *self._sources, *options], limit_s=limit_s)

    def _pip(self) -> list[str | Path]:
        return [self._python, "-m", "pip", "--disable-pip-version-check"]


def _configured_sources(python: Path) -> list[str]:
    """Returns uv's options for pip's configured package sources."""
    try:
        listed = subprocess.run(
            [python, "-m", "pip", "config", "list"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    settings: dict[str, list[str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], []).extend(_words(value))
    return sources_of(settings)


def _words(value: str) -> list[str]:
    """Splits a value printed by `pip config list`: `'/wheels'`."""
    try:
        return str(ast.literal_eval(value)).split()
    except (SyntaxError, ValueError):
        return value.split()


def sources_of(settings: dict[str, list[str]]) -> list[str]:
    """Returns uv's options for pip's settings `index-url`, `extra-index-url` and `find-links`."""
    extra = [url for url in settings.get("extra-index-url", []) if url.startswith("http")]
    return [
        *(f"--default-index={url}" for url in settings.get("index-url", [])),
        *(f"--index={url}" for url in extra),
        # Like pip, use the best version from all indexes.
        *(["--index-strategy=unsafe-best-match"] if extra else []),
        *(f"--find-links={place}" for place in settings.get("find-links", [])),
    ]


def locked_requirements(lock: Path, python: str, processor: str) -> Path | None:
    """Returns the lock file if it is for this Python (3.11) and processor (x86_64), else None."""
    try:
        first = lock.read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        return None
    return lock if first.endswith(f"on Python {python} and {processor}.") else None


def options_without_build(packages: Sequence[Path]) -> list[str | Path]:
    """Returns options that install these packages editable, without their requirements."""
    editable = [part for package in packages for part in ("-e", package)]
    return ["--no-build-isolation", "--no-deps", *editable]
