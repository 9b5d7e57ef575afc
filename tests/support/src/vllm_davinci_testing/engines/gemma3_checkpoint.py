"""A small Gemma3 with random weights and bidirectional attention within images."""

import math
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines.model_zoo import EOS_ID
from vllm_davinci_testing.engines.released_weights import write_network
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
# One token for up to four newlines, as in Gemma's tokenizer: vLLM joins those around images.
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
    """Writes configuration, fp32 weights, tokenizer and processor; returns the directory."""
    write_network(gemma3_config(), directory, seed, _fill_projector)
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


def _fill_projector(network: Any) -> None:
    weight = network.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[0]))


def gemma3_prompt(*words: str) -> str:
    """Joins strings with an image between each pair."""
    return VISION_START.join(words)
