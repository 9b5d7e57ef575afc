"""Injects faults into small engines and tabulates the outcomes.

Run by `nox -s faults`, with the arguments of `vllm_davinci_testing.engines.fault_points`.
"""

import subprocess
import sys

from versions import ROOT, stamp


def main(arguments: list[str]) -> int:
    module = "vllm_davinci_testing.engines.fault_points"
    command = [sys.executable, "-m", module, f"--stamp={stamp('core', 'vnpu')}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
