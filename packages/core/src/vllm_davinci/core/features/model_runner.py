"""Which of vLLM's model runners serves: V1, where the user has not chosen V2."""

from collections.abc import Mapping, MutableMapping

from vllm_davinci.core.errors import RELEASE, ConfigurationError
from vllm_davinci.core.features.feature import Engine, Runner
from vllm_davinci.core.features.registry import features

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


def check_model_runner(engine: Engine, environment: Mapping[str, str]) -> None:
    """Raises ConfigurationError for features that the engine's model runner does not serve."""
    if not engine.vllm.use_v2_model_runner:
        runner = Runner.V1
    elif is_v2_chosen(environment):
        runner = Runner.V2
    else:  # some options of vLLM choose it by themselves
        raise ConfigurationError(
            f"not available in {RELEASE}: watermarks and HiSparse, which take the V2 runner. Start "
            "without it."
        )
    unserved = [
        each.asked_by
        for each in features().values()
        if runner not in each.runners and each.is_asked(engine)
    ]
    if unserved:
        asked = f"with {MODEL_RUNNER}={'1' if runner is Runner.V2 else '0'}"
        raise ConfigurationError(
            f"not available in {RELEASE}: {', '.join(f'{each} {asked}' for each in unserved)}. "
            "Start without it."
        )
