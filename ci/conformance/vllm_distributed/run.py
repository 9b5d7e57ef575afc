"""vLLM's own tests of connectors, offload, balancing and ranks on `npu`: `run.py --checkout DIR`.

DIR is vLLM's unpacked source distribution; as in the suite `vllm`, models of a hub are stand-ins.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM = HERE.parent / "vllm"
sys.path += [str(VLLM), str(HERE.parents[1]), str(HERE.parent), str(HERE.parents[2] / "benchmarks")]

import hub  # noqa: E402 - of the suite beside this one
from file_suite import Suite  # noqa: E402 - in the folder above

import versions  # noqa: E402

SUITE = Suite(
    directory=HERE,
    what=f"tests of vLLM {versions.VLLM_VERSION} on device npu: connectors, offload, expert "
    "balancing, executors, ranks; models of a hub are stand-ins with random weights",
    source=f"vLLM {versions.VLLM_VERSION}'s unpacked source distribution",
    tests="tests",
    folders=(
        "tests/v1/kv_connector",
        "tests/v1/kv_offload",
        "tests/v1/simple_kv_offload",
        "tests/v1/distributed",
        "tests/v1/executor",
        "tests/distributed",
    ),
    import_from=(str(VLLM),),
    packages=(
        "tblib",
        "pytest-asyncio",
        "pytest-forked",
        "pytest-rerunfailures",
        "pytest-mock",
        "msgpack",  # of ray
        "ray",  # some files import it, and ask whether it is running
    ),
    packages_folder="conformance-packages-adapters",
    environment={
        "HF_HOME": str(hub.DIRECTORY),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VNPU_MEMORY": "8GiB",
    },
    plugins=("as_in_a_worker",),
    together=9,
    alone=r"set_default_device|RemoteOpenAIServer|import ray|LLM\(|Process\(|mp\.spawn",
    arguments=("--continue-on-collection-errors",),
    file_limit=1800.0,
)

if __name__ == "__main__":
    hub.make_missing()
    sys.exit(SUITE.main())
