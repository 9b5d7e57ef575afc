"""Selects vLLM's model runner: V2, unless the user has chosen V1 or Triton is not usable."""

import os
from collections.abc import Mapping, MutableMapping

from vllm_davinci.core.features.feature import Engine, Runner, refused

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
WHY_V1 = "vLLM finds no usable Triton, which V2 needs"
TRUE = ("1", "true")


def choose_model_runner(environment: MutableMapping[str, str]) -> bool:
    """Selects V2, or V1 without a usable Triton, unless the user has chosen a runner.

    vLLM itself would select V1 for some features that are served here on V2. Call it before vLLM's
    configuration reads the variable; child processes inherit the choice.
    Returns whether it had to select V1.
    """
    if MODEL_RUNNER in environment:
        return False
    from vllm.triton_utils import HAS_TRITON  # asks the platform, which imports this module

    environment[MODEL_RUNNER] = "1" if HAS_TRITON else "0"
    return not HAS_TRITON


def is_v2_chosen(environment: Mapping[str, str]) -> bool:
    """True if the variable selects the V2 runner."""
    return environment.get(MODEL_RUNNER, "").strip().lower() in TRUE


def runner_of(engine: Engine) -> Runner:
    """The model runner of an engine."""
    return Runner.V2 if _is_v2(engine) else Runner.V1


def _is_v2(engine: Engine) -> bool:
    return bool(getattr(engine.vllm, "use_v2_model_runner", False))


FEATURES = (
    refused(
        "watermark_config or hisparse_config",
        "watermarks and HiSparse",
        lambda e: _is_v2(e) and not is_v2_chosen(os.environ),
        because="they select vLLM's V2 model runner by themselves",
    ),
)
