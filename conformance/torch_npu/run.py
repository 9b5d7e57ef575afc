"""Runs torch_npu's own tests over the virtual NPU: `run.py --checkout DIR [NAMES]`.

Exits with 1 if a test fails without a reason in `reasons.toml`.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "ci"), str(HERE.parent)]

from file_suite import Suite  # noqa: E402 - in the folder above

SUITE = Suite(
    directory=HERE,
    what="torch_npu's own tests: streams, events, graphs, memory, random numbers, storage, "
    "collectives",
    source="a checkout of gitcode.com/Ascend/pytorch",
    tests="test",
    folders=("test/npu", "test/distributed"),
    packages=("expecttest", "scipy", "parameterized", "tabulate"),
    import_from=("test",),
    # Some tests read torch_npu's warnings, which `vnpu run` turns off.
    environment={"MASTER_ADDR": "127.0.0.1", "TORCH_NPU_WARNING_DISABLE": "0"},
    plugins=("ranks_from_a_server",),
    # Tests of collectives start their ranks again for each shape.
    test_limit=900,
    file_limit=3600.0,
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
