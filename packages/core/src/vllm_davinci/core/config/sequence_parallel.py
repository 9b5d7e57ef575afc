"""Tokens divided among the ranks of a DP rank between collectives: whether an engine can."""

from typing import TYPE_CHECKING

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shares_obstacle(vllm_config: "VllmConfig") -> str | None:
    """Why an engine cannot divide tokens, a clause that follows "because"; None if it can."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size == 1:
        return "a DP rank is one rank"
    providers = components.find(components.MODELS).values()
    if not providers:
        return f"{components.MODELS.package} is not installed"
    dividing = frozenset().union(*(provider.divides_tokens() for provider in providers))
    architecture = None if model is None else model.architecture
    if architecture not in dividing:
        return (
            f"the definition of {architecture} does not divide tokens; those of "
            f"{', '.join(sorted(dividing))} do"
        )
    if parallel.data_parallel_size > 1 and model.is_moe:
        return "DP ranks exchange whole steps with each other's experts"
    if parallel.use_sequence_parallel_moe:
        return "vLLM divides the tokens at the experts already"
    if vllm_config.speculative_config is not None:
        return "a draft model reads the hidden states of whole steps"
    return None


def check_shares(vllm_config: "VllmConfig", config: DavinciConfig) -> list[str]:
    """What to tell the user of options that do nothing here.

    Raises ConfigurationError when `enabled` was asked for by itself and cannot be had.
    """
    options = config.sequence_parallel
    given = options.model_fields_set
    if not options.enabled or not (given or config.overlap == "lean"):
        return []
    obstacle = shares_obstacle(vllm_config)
    if obstacle is None:
        return []
    if "enabled" in given:
        raise ConfigurationError(
            f"sequence_parallel.enabled = true is not possible because {obstacle}. Remove it."
        )
    return [f"Tokens are not divided among the ranks of a DP rank because {obstacle}."]
