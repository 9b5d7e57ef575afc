"""The choice of vLLM's model runner for a whole run of tests."""

from __future__ import annotations

import os

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# Choice -> the variable's value.
CHOICES = {"v1": "0", "v2": "1"}


def use(choice: str) -> None:
    """Call it before vLLM is imported: the fork server and all engines inherit it."""
    os.environ[VARIABLE] = CHOICES[choice]
