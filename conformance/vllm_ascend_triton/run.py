"""Runs vllm-ascend's tests of its Triton kernels: `run.py --checkout DIR`.

DIR is a checkout or a git directory. Kernels are imported from its package without a build.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "ci"), str(HERE.parent)]

from file_suite import Suite  # noqa: E402 - in the folder above

SUITE = Suite(
    directory=HERE,
    what="vllm-ascend's tests of its Triton kernels",
    source="a checkout or git directory of github.com/vllm-project/vllm-ascend",
    tests="tests",
    folders=("tests/e2e/nightly/single_node/ops/singlecard_ops/triton",),
    imported=("vllm_ascend",),
    import_from=(".",),
    packages=(),
    environment={"VNPU_TRITON": "1", "VNPU_MEMORY": "8GiB", "VLLM_NO_USAGE_STATS": "1"},
    plugins=("as_on_a_chip", "case_sample"),
    arguments=("--noconftest", "--most-cases=3", r"--too-large=12[0-9]{4}-1024"),
    rule="At most 3 cases of each function run. Their conftest files, which import tools of "
    "end-to-end tests, and what a build writes are absent.",
    together=6,
    alone="set_default_device",
    test_limit=100,
    file_limit=300.0,
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
