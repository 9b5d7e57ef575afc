"""Sequence parallelism between attention and MLP: engines that support it."""

from typing import TYPE_CHECKING

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENABLED = "sequence_parallel.enabled"


def reason_against_sequence_parallel(vllm_config: "VllmConfig") -> str | None:
    """Why an engine cannot run sequence parallel, as a clause after "because"; None if it can."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size == 1:
        return "there is one tensor-parallel rank"
    if parallel.prefill_context_parallel_size > 1:
        return "ranks divide the tokens of prefills already"
    providers = components.find(components.MODELS).values()
    if not providers:
        return f"{components.MODELS.package} is not installed"
    able = frozenset().union(*(each.sequence_parallel_architectures() for each in providers))
    architecture = None if model is None else model.architecture
    if architecture not in able:
        return (
            f"the definition of {architecture} is not sequence parallel; those of "
            f"{', '.join(sorted(able))} are"
        )
    if parallel.data_parallel_size > 1 and model.is_moe:
        return "DP ranks send the tokens of whole steps to each other's experts"
    if vllm_config.speculative_config is not None:
        return "a draft model reads the hidden states of whole steps"
    if vllm_config.lora_config is not None:
        return "adapters are chosen for the rows of whole steps"
    return None


def check_sequence_parallel(config: DavinciConfig, against: str | None) -> list[str]:
    """Warns about sequence parallel options without effect on this engine.

    against: why the engine cannot run sequence parallel, or None
    Raises ConfigurationError if `enabled` was explicitly requested and cannot be used.
    """
    options = config.sequence_parallel
    given = options.model_fields_set
    is_asked = options.enabled and (given or config.overlap == "lean")
    if against is None or not is_asked:
        return []
    if "enabled" in given:
        raise ConfigurationError(f"{ENABLED} = true is not possible because {against}. Remove it.")
    return [f"No step runs sequence parallel because {against}."]


FEATURES = (
    Feature(
        ENABLED,
        "sequence parallelism between attention and MLP",
        lambda e: e.config.sequence_parallel.enabled,
    ),
)
