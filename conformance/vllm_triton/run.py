"""Runs vLLM's tests of Triton kernels on `npu`: `run.py --checkout DIR`.

DIR is vLLM's unpacked source distribution. `files.txt` and `excluded.toml` list files that launch a
kernel; the latter cannot run here.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VLLM = HERE.parent / "vllm"
sys.path += [str(VLLM), str(ROOT / "ci"), str(HERE.parent), str(ROOT / "benchmarks")]

from vllm_suite import vllm_suite  # noqa: E402 - of the suite beside this one

# Rows of logits, over which a kernel takes minutes.
TOO_LARGE = r"(12[0-9]{4}-1024|1024-12[0-9]{4})"
SUITE = vllm_suite(
    HERE,
    "Triton kernels, written for CUDA",
    folders=(),
    import_from=(str(VLLM),),
    environment={"VNPU_TRITON": "1"},
    plugins=("on_the_npu", "case_sample"),
    arguments=("--most-cases=4", f"--too-large={TOO_LARGE}"),
    rule="387 files import a module with a Triton kernel. Here are some that launch one and are "
    "not for one vendor's devices; of each function at most 4 cases.",
    together=5,
    test_limit=60,
    file_limit=120.0,
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
