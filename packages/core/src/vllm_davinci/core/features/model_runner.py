"""Which of vLLM's model runners serves: V1, where the user has not chosen V2."""

import os
from collections.abc import Mapping, MutableMapping

from vllm_davinci.core.features.feature import Engine, Runner, refused

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
WHY_V1 = f"{MODEL_RUNNER}=1 chooses V2, which does not do all of it yet"
TRUE = ("1", "true")


def choose_model_runner(environment: MutableMapping[str, str]) -> bool:
    """Chooses vLLM's V1 model runner where the user has not chosen.

    vLLM's own choice depends on whether it takes Triton for usable: it does on a host with
    triton-ascend, and also where CUDA_VISIBLE_DEVICES is empty. To be called before vLLM's
    configuration asks; processes that this one starts inherit the choice.
    Returns whether vLLM would have taken V2.
    """
    if MODEL_RUNNER in environment:
        return False
    from vllm.triton_utils import HAS_TRITON  # asks the platform, which imports this module

    environment[MODEL_RUNNER] = "0"
    return bool(HAS_TRITON)


def is_v2_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the V2 runner was asked for by its variable."""
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
        because="they take vLLM's V2 model runner by themselves",
    ),
)
