"""Writes constraints.txt: the tested files of this release, by version and hash.

Run by `nox -s constraints`. pip resolves the packages' requirements for this Python and processor,
and lists the files that it would install.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import versions
import wheel_cache
from prepare_environment import own_requirements
from progress import StepFailedError, Steps
from versions import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
META = ROOT / "packages" / "meta" / "pyproject.toml"
LIMIT_S = 900
# Packages built here for the target `empty`, or published in variants for several devices.
WITHOUT_HASH = ("vllm", "torch", "torchvision")
HEAD = """\
# The files that this release was tested with, on Python {python} and {processor}.
# Written by `nox -s constraints`; do not edit. After torch, torchvision and vLLM as the README
# says, this installs exactly these files:
#
#   pip install --no-deps --require-hashes -r constraints.txt
#
"""


def resolved(requirements: list[str]) -> list[dict[str, Any]]:
    """Returns the files that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        options = ["--ignore-installed", f"--report={report}", *requirements]
        subprocess.run([*command, *options], check=True, timeout=LIMIT_S)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def lines(files: list[dict[str, Any]]) -> list[str]:
    """Formats the file's lines. A file without a hash becomes a comment, because pip requires
    hashes for all or none.
    """
    found = []
    for file in files:
        name = file["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
        pinned = f"{name}=={file['metadata']['version'].split('+')[0]}"
        if name in WITHOUT_HASH:
            found.append(f"# {pinned}")
        else:
            digest = file["download_info"]["archive_info"]["hashes"]["sha256"]
            found.append(f"{pinned} --hash=sha256:{digest}")
    return sorted(found, key=lambda line: line.removeprefix("# "))


def main() -> int:
    steps = Steps(1, ROOT / "build" / "constraints-logs")
    steps.start("the files that pip would install")
    try:
        vllm = wheel_cache.vllm_wheel(Path(sys.executable), steps)
        pinned = {"torch": versions.TORCH_VERSION, "torch-npu": versions.TORCH_NPU_VERSION}
        exactly = [f"{name}=={version}" for name, version in pinned.items()]
        vision = versions.read_toml(META)["project"]["optional-dependencies"]["vision"]
        # As in the tests' environment, where an older setuptools builds vLLM.
        tools = [each for each in wheel_cache.BUILD_REQUIREMENTS if each.startswith("setuptools>")]
        files = resolved([str(vllm), *exactly, *vision, *tools, *own_requirements()])
    except (StepFailedError, subprocess.SubprocessError) as error:
        print(f"no constraints were written: {error}", file=sys.stderr)
        return 1
    python = ".".join(map(str, sys.version_info[:2]))
    head = HEAD.format(python=python, processor=platform.machine())
    CONSTRAINTS.write_text(head + "\n".join(lines(files)) + "\n", encoding="utf-8")
    print(f"{CONSTRAINTS.name}: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
