"""The smallest InternVL: an encoder of square tiles of fixed size, then Qwen2."""

from collections.abc import Callable
from typing import Any

import transformers

PATCH = 14


def internvl_config(
    text: Callable[..., dict[str, Any]], image_token_id: int
) -> transformers.PretrainedConfig:
    """Has an encoder without windows and rotary embedding. text: makes the text model's fields"""
    return transformers.InternVLConfig(
        vision_config={
            "hidden_size": 144,  # heads of 72
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": [4 * PATCH] * 2,
            "patch_size": [PATCH] * 2,
            "attention_bias": True,
        },
        text_config={
            "model_type": "qwen2",
            **text(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        },
        image_token_id=image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def internvl_processor(tokenizer: Any) -> transformers.ProcessorMixin:
    side = {"height": 4 * PATCH, "width": 4 * PATCH}
    return transformers.InternVLProcessor(
        # Larger images are cut into squares, plus a thumbnail of the whole image.
        image_processor=transformers.GotOcr2ImageProcessor(
            size=side, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        video_processor=transformers.InternVLVideoProcessor(size=side),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
