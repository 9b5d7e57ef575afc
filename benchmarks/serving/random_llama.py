"""Writes a Llama of 23 million parameters with random weights, once per call."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 8192
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 11,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def write(directory: Path, seed: int) -> int:
    """Writes the checkpoint in bf16; returns its number of parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, tie_word_embeddings=False, **SHAPE
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
