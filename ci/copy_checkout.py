"""Copies this checkout's files, including untracked ones, to another folder.

`copy_checkout.py FOLDER`, run by `nox -s other_machine`. Links the environments under `.nox`, so
that their programs have paths below the folder.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from versions import ROOT


def copy(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        source = ROOT / name
        if source.is_file():  # git lists deleted files too
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    (target / ".nox").mkdir()
    for file in (ROOT / ".nox").glob("*/pyvenv.cfg"):
        (target / ".nox" / file.parent.name).symlink_to(file.parent)


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
