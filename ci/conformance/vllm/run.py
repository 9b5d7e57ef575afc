"""vLLM's own tests on device `npu`: `run.py --checkout DIR [NAMES]`.

DIR is vLLM's unpacked source distribution. `files.txt` has tests of what runs on the device, and
of what decides what runs there; models of a hub are stand-ins (hub.py). Files with a test that does
not pass run on vLLM's CPU backend too. Exit status 1 where a test does not pass for which
`reasons.toml` has no reason.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent), str(HERE.parents[2] / "benchmarks")]

import hub  # noqa: E402 - beside this file
from file_suite import Backend, Suite  # noqa: E402 - in the folder above

import versions  # noqa: E402
from serving import cpu_backend  # noqa: E402


def vllms_cpu_backend() -> Backend:
    return Backend(
        name="vLLM's CPU backend",
        python=cpu_backend.environment(),
        inherited=cpu_backend.child_environment(),
        packages=("pytest", "pluggy", "iniconfig", "pytest-timeout"),
    )


SUITE = Suite(
    directory=HERE,
    what=f"tests of vLLM {versions.VLLM_VERSION} on device npu: sampling, batches, runners, "
    "drafts, caches, schedulers, engines, metrics, structured output, logits processors; models "
    "of a hub are stand-ins with random weights",
    source=f"vLLM {versions.VLLM_VERSION}'s unpacked source distribution",
    tests="tests",
    folders=("tests/v1", "tests/entrypoints/llm"),
    packages=(
        "tblib",
        "pytest-asyncio",
        "pytest-forked",
        "pytest-rerunfailures",
        "pytest-mock",
    ),
    environment={
        "HF_HOME": str(hub.DIRECTORY),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VNPU_MEMORY": "8GiB",
    },
    plugins=("as_in_a_worker",),
    together=9,
    # Some tests start two engines.
    file_limit=1800.0,
    backend=vllms_cpu_backend,
)

if __name__ == "__main__":
    hub.make_missing()
    sys.exit(SUITE.main())
