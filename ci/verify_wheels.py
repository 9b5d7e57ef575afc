"""Checks our wheels: open namespace, one owner per file, licence."""

import argparse
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from progress import print_problems

# Licence files of a wheel (PEP 639).
LICENCE_FILES = ("LICENSE", "NOTICE")
NAMESPACE_INIT = "vllm_davinci/__init__.py"


def wheel_files(wheel: Path) -> list[str]:
    """Returns the names of the files that a wheel installs, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return installed_files(archive.namelist())


def wheel_problems(wheel: Path) -> list[str]:
    """Returns problems of a wheel's tag and licence files."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found = [
        f"{wheel.name} does not carry {name}: see license-files in its pyproject.toml"
        for name in LICENCE_FILES
        if not any(each.endswith(f".dist-info/licenses/{name}") for each in names)
    ]
    if "-linux_" in wheel.name:
        found.append(f"{wheel.name} is for this machine only: run ci/repair_wheels.py")
    return found


def installed_files(names: Iterable[str]) -> list[str]:
    return [name for name in names if ".dist-info/" not in name and not name.endswith("/")]


def problems(files: Mapping[str, list[str]]) -> list[str]:
    """Returns problems of a set of distributions. Argument: files by distribution."""
    found: list[str] = []
    owners: dict[str, list[str]] = {}
    for distribution, names in files.items():
        for name in names:
            owners.setdefault(name, []).append(distribution)
        if NAMESPACE_INIT in names:
            found.append(
                f"{distribution} holds {NAMESPACE_INIT}, which hides every other package: remove it"
            )
        if not any(name.endswith("/py.typed") for name in names):
            found.append(f"{distribution} has no py.typed: add one beside __init__.py")
    for name, distributions in owners.items():
        if len(distributions) > 1:
            found.append(f"{name} is owned by {' and '.join(sorted(distributions))}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="folder with the wheels")
    wheels = sorted(parser.parse_args().directory.glob("*.whl"))
    if not wheels:
        print("no wheels found: run `nox -s build`", file=sys.stderr)
        return 1
    found = problems({wheel.name: wheel_files(wheel) for wheel in wheels})
    found += [problem for wheel in wheels for problem in wheel_problems(wheel)]
    return print_problems(found, f"{len(wheels)} wheels")


if __name__ == "__main__":
    sys.exit(main())
