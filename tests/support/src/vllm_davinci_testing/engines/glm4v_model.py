"""The smallest GLM-4V: its encoder interpolates position embeddings for an image's patches."""

from collections.abc import Callable
from typing import Any

import transformers

PATCH = 14
TOKENS_OF_VIDEOS = ("<|begin_of_video|>", "<|end_of_video|>", "<|video|>")


def glm4v_config(
    text: Callable[..., dict[str, Any]], kind: str, **tokens: int
) -> transformers.PretrainedConfig:
    """text: makes the text model's fields; kind: its model type; tokens: ids of special tokens"""
    has_whole_heads = kind == "glm_ocr"
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0 if has_whole_heads else 0.5,
        "mrope_section": [8, 12, 12] if has_whole_heads else [4, 6, 6],
    }
    experts = {
        "head_dim": 64,
        "use_qk_norm": False,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    }
    return transformers.AutoConfig.for_model(
        kind,
        text_config=text(
            rope_parameters=rope,
            vocab_size=max(tokens.values()) + 1,
            **(experts if kind == "glm4v_moe" else {}),
            # Also the size of the encoder's merger, which transformers makes three times its
            # output.
            **(
                {"intermediate_size": 3 * 256}
                if has_whole_heads
                else {"attention_bias": True}  # as released; transformers always has these weights
            ),
        ),
        vision_config={
            "depth": 2 if has_whole_heads else 3,  # no answer contains an image token
            "hidden_size": 144,  # heads of 72
            "intermediate_size": 192,
            "num_heads": 2,
            "image_size": 6 * PATCH,
            "patch_size": PATCH,
            "out_hidden_size": 256,
        },
        **tokens,
    )


def glm4v_processor(
    tokenizer: Any, patch: int, smallest: int, largest: int
) -> transformers.ProcessorMixin:
    """smallest, largest: number of an image's pixels"""
    # An image counts as two frames.
    size = {"shortest_edge": 2 * smallest, "longest_edge": 2 * largest}
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(patch_size=patch, size=size),
        video_processor=transformers.Glm4vVideoProcessor(patch_size=patch, size=size),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
