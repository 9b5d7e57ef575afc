"""Builds each package's sdist, and from it the wheel, into dist/. Run by `nox -s build`."""

import argparse
import sys
from pathlib import Path

import wheel_cache
from prepare_environment import present_packages
from progress import Steps, exit_status
from versions import ROOT

DIST = ROOT / "dist"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="packages to build; default: all")
    names = parser.parse_args().names
    packages = [package for package in present_packages() if not names or package.name in names]
    steps = Steps(len(packages), DIST / "logs")
    python = Path(sys.executable)

    def build() -> None:
        for package in packages:
            steps.start(f"packages/{package.name}")
            steps.run(
                [python, "-m", "build", "--no-isolation", "--outdir", DIST, package],
                environment=wheel_cache.build_environment(python),
            )

    return exit_status(build)


if __name__ == "__main__":
    sys.exit(main())
