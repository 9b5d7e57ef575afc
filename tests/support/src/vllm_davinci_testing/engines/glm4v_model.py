"""GLM-4V at its smallest: its encoder interpolates position embeddings at an image's patches."""

from collections.abc import Callable
from typing import Any

import transformers

PATCH = 14
TOKENS_OF_VIDEOS = ("<|begin_of_video|>", "<|end_of_video|>", "<|video|>")


def glm4v_config(text: Callable[..., dict[str, Any]], **tokens: int) -> transformers.Glm4vConfig:
    """text: gives the text model's fields; tokens: numbers of the special ones"""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 6, 6],
    }
    return transformers.Glm4vConfig(
        text_config=text(
            rope_parameters=rope,
            vocab_size=max(tokens.values()) + 1,
            attention_bias=True,  # as released; transformers always has them
        ),
        vision_config={
            "depth": 3,
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
    """smallest, largest: pixels of an image"""
    size = {"shortest_edge": 2 * smallest, "longest_edge": 2 * largest}  # an image is two frames
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(patch_size=patch, size=size),
        video_processor=transformers.Glm4vVideoProcessor(patch_size=patch, size=size),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
