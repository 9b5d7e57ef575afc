"""torch_npu's own tests over the virtual NPU: `run.py --checkout DIR [NAMES]`.

Exit status 1 where a test does not pass for which `reasons.toml` has no reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent)]

from ascend_suite import Suite  # noqa: E402 - in the folder above

SUITE = Suite(
    HERE,
    "torch_npu's own tests: streams, events, graphs, memory, random numbers, storage, collectives",
    "gitcode.com/Ascend/pytorch",
    ("test/npu", "test/distributed"),
)

if __name__ == "__main__":
    sys.exit(SUITE.main("torch_npu's own tests over the virtual NPU"))
