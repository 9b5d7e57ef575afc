"""Finds another project's test files in a working tree or a git directory."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import wheel_cache

GIT_LIMIT_S = 300


def tests_of(checkout: Path, folder: str, scratch: Path) -> Path:
    """Copies only `folder` of the checkout to `scratch`.

    Beside the rest of the project, tests would import it instead of the installed package.
    """
    if (checkout / folder).is_dir():
        shutil.copytree(checkout / folder, scratch / folder)
        return scratch
    if not (checkout / "HEAD").is_file():
        raise SystemExit(f"{checkout} has no {folder} and is no git directory: pass a checkout.")
    _extract(checkout, [folder], scratch)
    return scratch


def _extract(git_directory: Path, what: Sequence[str], into: Path) -> None:
    archive = into / "checkout.tar"
    git = ["git", f"--git-dir={git_directory}"]
    command = [*git, "archive", f"--output={archive}", "HEAD", "--", *what]
    subprocess.run(command, check=True, timeout=GIT_LIMIT_S)
    subprocess.run(["tar", "-xf", archive, "-C", into], check=True, timeout=GIT_LIMIT_S)
    archive.unlink()


def files_of(checkout: Path, patterns: Sequence[str], scratch: Path) -> Path:
    """Returns a directory with the matching files: the checkout itself, or a copy in `scratch`.

    patterns: git's, such as ":(glob)**/examples/*.cpp"
    """
    if not (checkout / "HEAD").is_file():
        return checkout
    scratch.mkdir(parents=True, exist_ok=True)
    _extract(checkout, patterns, scratch)
    return scratch


def version_of(checkout: Path) -> str:
    """Returns commit and date of HEAD; without git, the directory's name."""
    where = checkout / ".git" if (checkout / ".git").exists() else checkout
    command = ["git", f"--git-dir={where}", "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=False)
    return done.stdout.strip() or checkout.resolve().name


def extra_packages(*names: str, folder: str = "conformance-packages") -> Path:
    """Returns a directory beside the wheel cache with packages that only these tests import.

    Their requirements are in the environment that runs the tests.
    """
    tag = sys.implementation.cache_tag
    place = wheel_cache.cache_directory().parent / f"{folder}-{tag}"
    found = {path.name.partition("-")[0] for path in place.glob("*.dist-info")}
    missing = [name for name in names if name.replace("-", "_") not in found]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, f"--target={place}", *missing], check=True, timeout=GIT_LIMIT_S)
    return place
