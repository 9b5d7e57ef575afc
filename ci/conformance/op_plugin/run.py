"""op-plugin's tests of operators over the virtual NPU: `run.py --checkout DIR [NAMES]`.

`files.txt` has those of `test_base_ops` up to the letter h, but `test_group_norm.py`, which takes
10 GiB of the host's memory, and the fused operators of inference in `test_custom_ops`.
Exit status 1 where a test does not pass for which `reasons.toml` has no reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent)]

from file_suite import Suite  # noqa: E402 - in the folder above

SUITE = Suite(
    directory=HERE,
    what="op-plugin's tests of operators: torch's, and fused ones of inference",
    source="a checkout of gitcode.com/Ascend/op-plugin",
    tests="test",
    folders=("test/test_base_ops", "test/test_custom_ops"),
    packages=("expecttest", "scipy", "parameterized"),
    import_from=("test",),
    environment={"MASTER_ADDR": "127.0.0.1"},
    arguments=("-o", "python_functions=none"),  # their tests are methods
    together=12,
    alone=r"jit_compile=True",
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
