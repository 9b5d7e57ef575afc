"""Dry-runs published deployments and writes results/deployments/page.md.

Run by `nox -s deployments`; `-- NAME...` selects rows of `vllm-davinci deployments` (default: all).
"""

import subprocess
import sys

from versions import ROOT, stamp

RESULTS = ROOT / "results" / "deployments"


def main(names: list[str]) -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "vllm_davinci.meta", "deployments", f"--run={RESULTS}"),
        *(f"--page={RESULTS / 'page.md'}", f"--stamp={stamp('meta', 'core', 'vnpu')}", *names),
    ]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
