"""Kinds of models that this release cannot run, or for which it would give other tokens."""

from typing import Any

from vllm_davinci.core.config.architectures import (
    is_foreign,
    keeps_states,
    with_states,
)
from vllm_davinci.core.features.feature import Feature

_OTHERS = (
    "Choose a model of attention layers, such as Llama, Qwen3, Qwen3-MoE or DeepSeek-V3, or "
    f"{', '.join(with_states())}."
)


def _needs(title: str, is_needed: Any) -> Feature:
    """A need of models that this release does not support. is_needed: of vLLM's ModelConfig"""
    return Feature(
        "",
        title,
        lambda engine: engine.model is not None and bool(is_needed(engine.model)),
        is_served=False,
        instead=_OTHERS,
    )


FEATURES = (
    _needs("a definition for NPUs (vLLM's needs kernels of CUDA or ROCm)", is_foreign),
    _needs(
        "cross-attention (encoder-decoder other than Whisper)",
        lambda model: model.is_encoder_decoder and model.hf_config.model_type != "whisper",
    ),
    _needs(
        "recurrent state of a kind that is not supported or has not been tried here",
        lambda model: (
            keeps_states(model)
            and not is_foreign(model)
            and not {*model.architectures} <= {*with_states()}
        ),
    ),
)
