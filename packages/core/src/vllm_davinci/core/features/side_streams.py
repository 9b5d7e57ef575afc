"""Side streams inside layers: models that have a use for them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.config.side_streams import ATTENTION, EXPERTS, PREFETCH, side_stream
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import BOTH, Engine, Feature

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Fields of models' configurations that say how many or how wide their shared experts are.
SHARED_EXPERT_FIELDS = ("n_shared_experts", "shared_expert_intermediate_size")


def has_shared_experts(model: "ModelConfig") -> bool:
    """Whether a model has experts that every token goes through."""
    return any(getattr(model.hf_text_config, name, None) for name in SHARED_EXPERT_FIELDS)


def _row(
    key: str, title: str, is_asked: Callable[[Engine], bool], has: Callable[[Any], bool], use: str
) -> Feature:
    """A side stream.

    has: whether a model has the part that runs on it
    use: the end of the error about a model that has not, before and after its name
    """

    def settle(engine: Engine) -> None:
        if side_stream(engine.vllm, key) and engine.model is not None and not has(engine.model):
            raise ConfigurationError(
                f"additional_config key {key!r} {use.format(engine.model.model)}. Remove the key."
            )

    return Feature(key, title, is_asked, BOTH, settle=settle)


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
        "runs shared experts beside routed ones, and {} has no shared experts",
    ),
    _row(
        PREFETCH,
        "prefetch of weights on a side stream",
        lambda e: e.config.weight_prefetch_config.enabled,
        lambda model: model.use_mla,
        "fetches weights of models with MLA, and {} has none",
    ),
)
