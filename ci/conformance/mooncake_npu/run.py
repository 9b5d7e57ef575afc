"""Mooncake's real build for NPUs over the virtual NPU: `run.py`.

It is installed into a folder beside the wheel cache; tests/e2e/test_mooncake_on_npu.py runs with it
in place of the build for the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / "ci"), str(ROOT / "ci" / "conformance")]

import checkout  # noqa: E402 - in the folder above

PACKAGE = "mooncake-transfer-engine-npu"
LIMIT_S = 900


def main() -> int:
    place = checkout.extra_packages(PACKAGE, folder="conformance-packages-mooncake-npu")
    test = "tests/e2e/test_mooncake_on_npu.py"
    path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", test, "-p", "no:cacheprovider", "-rs", *sys.argv[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
