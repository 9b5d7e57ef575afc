"""Fails if a package's sources changed without its version or changelog.

A release is the tag NAME-vVERSION. Sources that differ from their version's tag need a new version,
and every version needs a heading in the package's CHANGELOG.md. Run by `nox -s release_check`.
"""

import subprocess
import sys
from pathlib import Path

from prepare_environment import present_packages
from progress import print_problems
from versions import read_toml

SOURCES = ("src", "csrc", "include", "soc", "CMakeLists.txt", "pyproject.toml")


def package_problems(package: Path) -> list[str]:
    """Returns what prevents a release of the package."""
    version = read_toml(package / "pyproject.toml")["project"]["version"]
    found: list[str] = []
    changelog = package / "CHANGELOG.md"
    if not changelog.is_file() or f"## {version}" not in changelog.read_text(encoding="utf-8"):
        found.append(f"{package.name}: CHANGELOG.md has no heading `## {version}`")
    tag = f"{package.name}-v{version}"
    if _git(package, "tag", "--list", tag) and _git(package, "diff", "--stat", tag, "--", *SOURCES):
        found.append(
            f"{package.name}: the sources differ from tag {tag}; raise `version` in pyproject.toml "
            "and describe the change in CHANGELOG.md"
        )
    return found


def _git(package: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=package, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def main() -> int:
    packages = present_packages()
    found = [problem for package in packages for problem in package_problems(package)]
    return print_problems(found, f"{len(packages)} packages")


if __name__ == "__main__":
    sys.exit(main())
