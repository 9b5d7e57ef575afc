"""The smallest Qwen3.5: Qwen3-VL's encoder, gated delta rules and gated attention."""

from collections.abc import Callable
from typing import Any

import transformers

from vllm_davinci_testing.engines.hybrid_zoo import EXPERTS_OF_QWEN, GATED_DELTA_NET


def qwen3_5_config(
    text: Callable[..., dict[str, Any]], patch: int, has_experts: bool, **tokens: int
) -> transformers.PretrainedConfig:
    """text: makes the text model's fields; tokens: ids of special tokens"""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    fields = text(
        head_dim=64,
        hidden_size=128,
        rope_parameters=rope,
        **{**GATED_DELTA_NET, "layer_types": ["linear_attention", "full_attention"]},
        **(EXPERTS_OF_QWEN if has_experts else {}),
    )
    kind = transformers.Qwen3_5MoeConfig if has_experts else transformers.Qwen3_5Config
    return kind(
        text_config=fields,
        vision_config={
            "depth": 3 if has_experts else 2,  # no answer contains an image token
            "hidden_size": 144,  # heads of 72
            "intermediate_size": 192,
            "num_heads": 2,
            "patch_size": patch,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
        },
        **tokens,
    )
