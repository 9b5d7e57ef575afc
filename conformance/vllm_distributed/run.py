"""Runs vLLM's tests of connectors, offload, balancing and ranks on `npu`: `run.py --checkout DIR`.

DIR is vLLM's unpacked source distribution. As in the suite `vllm`, small random models replace hub
models.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VLLM = HERE.parent / "vllm"
sys.path += [str(VLLM), str(ROOT / "ci"), str(HERE.parent), str(ROOT / "benchmarks")]

import hub  # noqa: E402 - of the suite beside this one
from vllm_suite import WITH_RAY, vllm_suite  # noqa: E402

SUITE = vllm_suite(
    HERE,
    "connectors, offload, expert balancing, executors, ranks; models of a hub are stand-ins with "
    "random weights",
    folders=(
        "tests/v1/kv_connector",
        "tests/v1/kv_offload",
        "tests/v1/simple_kv_offload",
        "tests/v1/distributed",
        "tests/v1/executor",
        "tests/distributed",
    ),
    import_from=(str(VLLM),),
    packages=WITH_RAY,
    packages_folder="conformance-packages-adapters",
    plugins=("as_in_a_worker",),
    together=9,
    alone=r"set_default_device|RemoteOpenAIServer|import ray|LLM\(|Process\(|mp\.spawn",
    arguments=("--continue-on-collection-errors",),
)

if __name__ == "__main__":
    hub.make_missing()
    sys.exit(SUITE.main())
