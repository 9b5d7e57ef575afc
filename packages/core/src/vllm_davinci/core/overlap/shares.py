"""Tokens divided among the ranks of a replica between collectives: whether an engine can."""

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm_davinci.core.components import MODELS
from vllm_davinci.core.config import DavinciConfig
from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def shares_obstacle(vllm_config: "VllmConfig") -> str | None:
    """Why an engine cannot divide tokens, a clause that follows "because"; None if it can."""
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return "a replica is one rank"
    if vllm_config.model_config is None or not vllm_config.model_config.use_mla:
        return "only definitions of models with latent attention can divide tokens"
    if not entry_points(group=MODELS.group):
        return f"{MODELS.package} is not installed"
    if parallel.data_parallel_size > 1:
        return "replicas exchange whole steps with each other's experts"
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
    return [f"Tokens are not divided among the ranks of a replica because {obstacle}."]
