"""Small multimodal checkpoints with random weights: an encoder of images before a text model.

vLLM's models of these families need torchvision, for their image processors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from vllm_davinci_testing.engines.model_zoo import (
    BOS,
    EOS,
    EOS_ID,
    NUM_BYTES,
    fill_with_normal_weights,
    write_tokenizer,
)

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
FIRST_SPECIAL_ID = NUM_BYTES + 2
VOCAB_SIZE = FIRST_SPECIAL_ID + len(SPECIAL)
START_ID, END_ID, IMAGE_ID, VIDEO_ID = range(FIRST_SPECIAL_ID, VOCAB_SIZE)

PATCH = 14


@dataclass(frozen=True)
class VisionModel:
    """One checkpoint: `make_config` gives its transformers configuration."""

    name: str
    patch_size: int
    make_config: Callable[[], transformers.PretrainedConfig]


def _text(**options: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "tie_word_embeddings": False,
        **options,
    }


_TOKENS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
}


def _qwen2_5_vl() -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    return transformers.Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=rope),
        vision_config={
            "depth": 4,
            "hidden_size": 160,  # heads of 80
            "intermediate_size": 192,
            "num_heads": 2,
            "patch_size": PATCH,
            "window_size": 4 * PATCH,  # windows of two by two merged patches
            "fullatt_block_indexes": [1, 3],
            "out_hidden_size": 256,
            "tokens_per_second": 2,
        },
        **_TOKENS,
    )


def _qwen3_vl() -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    return transformers.Qwen3VLConfig(
        text_config=_text(head_dim=64, rope_parameters=rope),
        vision_config={
            "depth": 3,
            "hidden_size": 144,  # heads of 72
            "intermediate_size": 192,
            "num_heads": 2,
            "patch_size": PATCH,
            "out_hidden_size": 256,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **_TOKENS,
    )


def _qwen2_vl() -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    return transformers.Qwen2VLConfig(
        text_config=_text(rope_parameters=rope),
        vision_config={
            "depth": 3,
            "embed_dim": 128,
            "hidden_size": 256,  # of the text model
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": PATCH,
        },
        **_TOKENS,
    )


MODELS = {
    model.name: model
    for model in (
        VisionModel("qwen2_5_vl", PATCH, _qwen2_5_vl),
        VisionModel("qwen3_vl", PATCH, _qwen3_vl),
        VisionModel("qwen2_vl", PATCH, _qwen2_vl),
    )
}


def write_vision_checkpoint(name: str, directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and image processor; the directory."""
    model = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForImageTextToText.from_config(
            model.make_config(), dtype=torch.float32
        )
        fill_with_normal_weights(network)
    network.save_pretrained(directory)
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    # The server puts the places of images into the text.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    transformers.Qwen2VLImageProcessor(
        patch_size=model.patch_size, size={"shortest_edge": 28 * 28, "longest_edge": 280 * 280}
    ).save_pretrained(directory)
    return directory


def prompt(number_of_images: int, words: str = "what is this") -> str:
    """A prompt with places for so many images."""
    return (VISION_START + IMAGE_PAD + VISION_END) * number_of_images + words


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise over a gradient, so that every patch differs."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 128, (height, width, 3), generator=generator, dtype=torch.uint8)
    ramp = torch.linspace(0, 127, width).to(torch.uint8)[None, :, None]
    return Image.fromarray((noise + ramp).numpy())


__all__ = [
    "BOS", "EOS", "IMAGE_PAD", "MODELS", "VIDEO_PAD", "image", "prompt", "write_vision_checkpoint",
]  # fmt: skip
