"""Runs vLLM's own tests on device `npu`: `run.py --checkout DIR [NAMES]`.

DIR is vLLM's unpacked source distribution. `files.txt` lists tests of code that runs on the device
or decides what runs there; small random models replace hub models (hub.py). Exits with 1 if a test
fails without a reason in `reasons.toml`.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT / "ci"), str(HERE.parent)]

import hub  # noqa: E402 - beside this file
from vllm_suite import vllm_suite  # noqa: E402 - beside this file

SUITE = vllm_suite(
    HERE,
    "sampling, batches, runners, drafts, caches, schedulers, engines, metrics, structured output, "
    "logits processors; models of a hub are stand-ins with random weights",
    folders=("tests/v1", "tests/entrypoints/llm"),
    plugins=("as_in_a_worker", "npu_in_lists"),
    together=9,
)

if __name__ == "__main__":
    hub.make_missing()
    sys.exit(SUITE.main())
