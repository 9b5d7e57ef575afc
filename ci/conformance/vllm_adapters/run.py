"""vLLM's own tests of adapters and weight transfer on device `npu`: `run.py --checkout DIR`.

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
    what=f"tests of vLLM {versions.VLLM_VERSION} on device npu: weights, managers and settings of "
    "adapters, weight transfer of a worker; not yet layers, sleep mode and reloading",
    source=f"vLLM {versions.VLLM_VERSION}'s unpacked source distribution",
    tests="tests",
    folders=("tests/lora", "tests/basic_correctness/memory", "tests/entrypoints/rl"),
    import_from=(str(VLLM),),
    packages=(
        "tblib",
        "pytest-asyncio",
        "pytest-forked",
        "pytest-rerunfailures",
        "pytest-mock",
        "msgpack",  # of ray
        "ray",  # each test's end asks whether it is running
    ),
    packages_folder="conformance-packages-adapters",
    environment={
        "HF_HOME": str(hub.DIRECTORY),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VNPU_MEMORY": "8GiB",
    },
    plugins=("as_in_a_worker",),
)

if __name__ == "__main__":
    hub.make_missing()
    sys.exit(SUITE.main())
