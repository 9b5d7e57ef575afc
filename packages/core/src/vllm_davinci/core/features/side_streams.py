"""Side streams inside layers: the models that use them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.config.side_streams import ATTENTION, EXPERTS, PREFETCH, side_stream
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Configuration fields that give the number or width of shared experts.
SHARED_EXPERT_FIELDS = (
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
)


def has_shared_experts(model: "ModelConfig") -> bool:
    """True if every token passes through shared experts."""
    return any(getattr(model.hf_text_config, name, None) for name in SHARED_EXPERT_FIELDS)


def _row(
    key: str, title: str, is_asked: Callable[[Engine], bool], has: Callable[[Any], bool], use: str
) -> Feature:
    """A feature that runs part of a model on a side stream.

    has: whether a model has that part
    use: end of the error for a model without it; {} is the model's name
    """

    def settle(engine: Engine) -> None:
        if side_stream(engine.vllm, key) and engine.model is not None and not has(engine.model):
            raise ConfigurationError(
                f"additional_config key {key!r} {use.format(engine.model.model)}. Remove the key."
            )

    return Feature(key, title, is_asked, settle=settle)


FEATURES = (
    _row(
        ATTENTION,
        "vector work of MLA on a side stream",
        lambda e: e.config.torchair_graph_config.enable_multistream_mla,
        lambda model: model.use_mla,
        "is for MLA, and {} has none",
    ),
    _row(
        EXPERTS,
        "shared experts on a side stream",
        lambda e: e.config.torchair_graph_config.enable_multistream_moe,
        has_shared_experts,
        "overlaps shared experts with routed ones, and {} has no shared experts",
    ),
    _row(
        PREFETCH,
        "prefetch of weights on a side stream",
        lambda e: e.config.weight_prefetch_config.enabled,
        lambda model: model.use_mla,
        "prefetches weights of models with MLA, and {} has none",
    ),
)
