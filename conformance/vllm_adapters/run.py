"""Runs vLLM's tests of adapters and weight transfer on `npu`: `run.py --checkout DIR`.

DIR is vLLM's unpacked source distribution. As in the suite `vllm`, stand-ins replace hub models,
and adapters (hub_adapters.py).
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VLLM = HERE.parent / "vllm"
sys.path += [str(VLLM), str(ROOT / "ci"), str(HERE.parent), str(ROOT / "benchmarks")]

import hub  # noqa: E402 - of the suite beside this one
import hub_adapters  # noqa: E402 - beside this file
from vllm_suite import WITH_RAY, vllm_suite  # noqa: E402

BY_RAY = (
    "test_weight_transfer.py::test_ipc_weight_transfer_between_processes",
    "test_weight_transfer.py::test_nccl_weight_transfer_between_processes",
    "test_weight_transfer_m2n.py::test_m2n_weight_transfer_between_processes",
    "test_weight_transfer_m2n.py::test_m2n_weight_transfer_to_tp2_shards",
    "test_weight_transfer_nccl_uid.py::test_nccl_weight_transfer_between_processes_uid",
    "test_weight_transfer_nccl_uid.py::test_nccl_weight_transfer_torch_free_trainer",
)
SUITE = vllm_suite(
    HERE,
    "adapters, sleep, reloading and transfer of weights, but by Ray; models and adapters of a hub "
    "are stand-ins with random weights",
    folders=(
        "tests/lora",
        "tests/entrypoints/serve/lora",
        "tests/plugins_tests/lora_resolvers",
        "tests/basic_correctness/memory",
        "tests/entrypoints/rl",
    ),
    import_from=(str(VLLM),),
    packages=WITH_RAY,
    packages_folder="conformance-packages-adapters",
    plugins=("as_in_a_worker", "npu_in_lists", "as_in_a_manager"),
    together=5,
    alone=r"set_default_device|RemoteOpenAIServer|import ray|LLM\(",
    # A file that fails to read a hub during its import must not stop its process's other files.
    arguments=(
        "--continue-on-collection-errors",
        # These tests wait until each time limit for one of Ray's GPUs, which does not exist.
        *(f"--deselect=tests/distributed/{test}" for test in BY_RAY),
    ),
)

if __name__ == "__main__":
    hub.make_missing()
    hub_adapters.make_missing()
    sys.exit(SUITE.main())
