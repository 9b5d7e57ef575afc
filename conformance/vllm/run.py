"""Runs vLLM's own tests on device `npu`: `run.py --checkout DIR [NAMES]`.

DIR is vLLM's unpacked source distribution. `files.txt` has tests of what runs on the device, and
of what decides what runs there; models of a hub are stand-ins (hub.py). Files with a test that does
not pass run on vLLM's CPU backend too. Exit status 1 if a test fails without a reason in
`reasons.toml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "ci"), str(HERE.parent), str(ROOT / "benchmarks")]

import hub  # noqa: E402 - beside this file
from file_suite import Backend  # noqa: E402 - in the folder above
from vllm_suite import vllm_suite  # noqa: E402 - beside this file

from serving import cpu_backend  # noqa: E402


def vllms_cpu_backend() -> Backend:
    return Backend(
        name="vLLM's CPU backend",
        python=cpu_backend.environment(),
        inherited=cpu_backend.child_environment(),
        packages=("pytest", "pluggy", "iniconfig", "pytest-timeout"),
    )


SUITE = vllm_suite(
    HERE,
    "sampling, batches, runners, drafts, caches, schedulers, engines, metrics, structured output, "
    "logits processors; models of a hub are stand-ins with random weights",
    folders=("tests/v1", "tests/entrypoints/llm"),
    plugins=("as_in_a_worker", "npu_in_lists"),
    together=9,
    backend=vllms_cpu_backend,
)

if __name__ == "__main__":
    hub.make_missing()
    sys.exit(SUITE.main())
