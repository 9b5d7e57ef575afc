"""Side streams inside layers: whether this engine uses them, and which scheduler runs them."""

from typing import TYPE_CHECKING

from vllm_davinci.core import components
from vllm_davinci.core.components.protocols import StreamScheduler
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import ComponentError, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

ATTENTION = "torchair_graph_config.enable_multistream_mla"
EXPERTS = "torchair_graph_config.enable_multistream_moe"
PREFETCH = "weight_prefetch_config.enabled"
# Fields of models' configurations that say how many or how wide their shared experts are.
SHARED_EXPERT_FIELDS = ("n_shared_experts", "shared_expert_intermediate_size")


def attention_scheduler(vllm_config: "VllmConfig") -> StreamScheduler | None:
    """The scheduler that runs MLA's vector work on a side stream; None when the option is off."""
    is_on = get_config(vllm_config).torchair_graph_config.enable_multistream_mla
    return _required(ATTENTION) if is_on else None


def experts_scheduler(vllm_config: "VllmConfig") -> StreamScheduler | None:
    """The scheduler that runs shared experts on a side stream; None when the option is off."""
    is_on = get_config(vllm_config).torchair_graph_config.enable_multistream_moe
    return _required(EXPERTS) if is_on else None


def prefetch_scheduler(vllm_config: "VllmConfig") -> StreamScheduler | None:
    """The scheduler that runs weight prefetches on a side stream; None when the option is off."""
    is_on = get_config(vllm_config).weight_prefetch_config.enabled
    return _required(PREFETCH) if is_on else None


def has_shared_experts(model: "ModelConfig") -> bool:
    """Whether a model has experts that every token goes through."""
    return any(getattr(model.hf_text_config, name, None) for name in SHARED_EXPERT_FIELDS)


def check_streams(vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError or ComponentError for an option that cannot apply."""
    model = vllm_config.model_config
    if attention_scheduler(vllm_config) is not None and model is not None and not model.use_mla:
        raise ConfigurationError(
            f"additional_config key {ATTENTION!r} is for MLA, and {model.model} has "
            "none. Remove the key."
        )
    if prefetch_scheduler(vllm_config) is not None and model is not None and not model.use_mla:
        raise ConfigurationError(
            f"additional_config key {PREFETCH!r} fetches weights of models with MLA, and "
            f"{model.model} has none. Remove the key."
        )
    if (
        experts_scheduler(vllm_config) is not None
        and model is not None
        and not has_shared_experts(model)
    ):
        raise ConfigurationError(
            f"additional_config key {EXPERTS!r} runs shared experts beside routed ones, and "
            f"{model.model} has no shared experts. Remove the key."
        )


def _required(key: str) -> StreamScheduler:
    scheduler = components.stream_scheduler()
    if scheduler is None:
        package = components.STREAMS.package
        raise ComponentError(
            f"{key} needs {package}, which is not installed. `pip install {package}` adds it."
        )
    return scheduler
