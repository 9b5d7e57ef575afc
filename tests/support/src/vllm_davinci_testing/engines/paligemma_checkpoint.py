"""A small PaliGemma with random weights, all of whose prompt sees itself both ways."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from vllm_davinci_testing.engines.gemma3_checkpoint import name_as_released
from vllm_davinci_testing.engines.model_zoo import (
    EOS_ID,
    NUM_BYTES,
    fill_with_normal_weights,
    write_tokenizer,
)

SIDE, PATCH = 56, 14
TOKENS_PER_IMAGE = (SIDE // PATCH) ** 2
IMAGE = "<image>"
NEWLINE = "\n"  # ends every prompt, and is one token of Gemma's
IMAGE_ID = NUM_BYTES + 2


def paligemma_config() -> transformers.PaliGemmaConfig:
    return transformers.PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "vocab_size": IMAGE_ID + 2,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 1024,
            "bos_token_id": EOS_ID - 1,
            "eos_token_id": EOS_ID,
            "pad_token_id": EOS_ID,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "projection_dim": 128,
            "vision_use_head": False,
        },
        image_token_index=IMAGE_ID,
        projection_dim=128,
        bos_token_id=EOS_ID - 1,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        tie_word_embeddings=True,
    )


def write_paligemma(directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and processor; the directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForImageTextToText.from_config(
            paligemma_config(), dtype=torch.float32
        )
        fill_with_normal_weights(network)
    network.save_pretrained(directory)
    name_as_released(directory / "model.safetensors")
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory, model_specific_special_tokens={"image_token": IMAGE}
    )
    tokenizer.add_tokens([NEWLINE])
    tokenizer.save_pretrained(directory)
    images = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = TOKENS_PER_IMAGE
    transformers.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(
        directory
    )
    return directory
