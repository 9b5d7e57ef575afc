"""A small Gemma3 with random weights, whose images see each other both ways."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_davinci_testing.engines.model_zoo import EOS_ID, fill_with_normal_weights, write_tokenizer
from vllm_davinci_testing.engines.vision_zoo import (
    END_ID,
    IMAGE_ID,
    IMAGE_PAD,
    SPECIAL,
    START_ID,
    VISION_END,
    VISION_START,
    VOCAB_SIZE,
)

SIDE, PATCH = 112, 14
TOKENS_PER_IMAGE = 16
WINDOW = 12  # shorter than an image
# One token for up to four of them, as Gemma's tokenizer has: vLLM joins those around images.
NEWLINES = ["\n" * count for count in range(1, 5)]


def gemma3_config() -> transformers.Gemma3Config:
    return transformers.Gemma3Config(
        text_config={
            "vocab_size": VOCAB_SIZE + len(NEWLINES),
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": WINDOW,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "max_position_embeddings": 1024,
            "bos_token_id": EOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": EOS_ID,
        },
        vision_config={
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=START_ID,
        eoi_token_index=END_ID,
        image_token_index=IMAGE_ID,
        tie_word_embeddings=True,
    )


def write_gemma3(directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and processor; the directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForImageTextToText.from_config(
            gemma3_config(), dtype=torch.float32
        )
        fill_with_normal_weights(network)
        projector: Any = network.model.multi_modal_projector
        torch.nn.init.normal_(
            projector.mm_input_projection_weight,
            std=1 / math.sqrt(projector.mm_input_projection_weight.shape[0]),
        )
    network.save_pretrained(directory)
    name_as_released(directory / "model.safetensors")
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory,
        model_specific_special_tokens={
            "boi_token": VISION_START,
            "eoi_token": VISION_END,
            "image_token": IMAGE_PAD,
        },
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(NEWLINES)
    tokenizer.save_pretrained(directory)
    transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_IMAGE,
    ).save_pretrained(directory)
    return directory


def name_as_released(file: Path) -> None:
    """transformers 5 writes an encoder without a part of its names, and Qwen2-Audio's text with one
    too many: it reads, and vLLM needs, the names that released files have."""
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    weights = {_released_name(name): each for name, each in load_file(file).items()}
    save_file(weights, file, metadata)


def _released_name(name: str) -> str:
    name = re.sub(r"(^|\.)vision_tower\.(?!vision_model)", r"\1vision_tower.vision_model.", name)
    return re.sub(r"^language_model\.model\.model\.", "language_model.model.", name)


def gemma3_prompt(*words: str) -> str:
    """Words with an image between each two."""
    return VISION_START.join(words)
