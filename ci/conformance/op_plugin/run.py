"""op-plugin's tests of operators over the virtual NPU: `run.py --checkout DIR [NAMES]`.

`files.txt` has all of them; `excluded.toml` says which are not run, and why.
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
    what="op-plugin's tests of operators: torch's, and its own fused ones",
    source="a checkout of gitcode.com/Ascend/op-plugin",
    tests="test",
    folders=("test/test_base_ops", "test/test_custom_ops"),
    packages=("expecttest", "scipy", "parameterized", "ml_dtypes", "en_dtypes"),
    import_from=("test",),
    environment={"MASTER_ADDR": "127.0.0.1"},
    arguments=("-o", "python_functions=none"),  # their tests are methods
    plugins=("ranks_from_a_server",),
    together=12,
    alone=r"jit_compile=True",
    file_limit=700.0,  # two tests that take minutes on a busy machine
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
