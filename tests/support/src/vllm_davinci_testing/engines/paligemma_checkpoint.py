"""A small PaliGemma with random weights and bidirectional attention in the whole prompt."""

from pathlib import Path

import transformers

from vllm_davinci_testing.engines.model_zoo import EOS_ID, NUM_BYTES
from vllm_davinci_testing.engines.multimodal_family import (
    IMAGE,
    PATCH,
    SIDE,
    text_fields,
    vision_fields,
)
from vllm_davinci_testing.engines.released_weights import write_network

TOKENS_PER_IMAGE = (SIDE // PATCH) ** 2
NEWLINE = "\n"  # ends every prompt; a single token in Gemma's tokenizer
IMAGE_ID = NUM_BYTES + 2


def paligemma_config() -> transformers.PaliGemmaConfig:
    return transformers.PaliGemmaConfig(
        text_config=text_fields(
            "gemma", vocab_size=IMAGE_ID + 2, bos_token_id=EOS_ID - 1, tie_word_embeddings=True
        ),
        vision_config=vision_fields(
            "siglip_vision_model", projection_dim=128, vision_use_head=False
        ),
        image_token_index=IMAGE_ID,
        projection_dim=128,
        bos_token_id=EOS_ID - 1,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        tie_word_embeddings=True,
    )


def write_paligemma(directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and processor; returns the directory."""
    write_network(paligemma_config(), directory, seed)
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
