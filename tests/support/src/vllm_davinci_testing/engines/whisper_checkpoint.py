"""A small Whisper with random weights: an audio encoder, and a decoder that attends to it."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from vllm.model_executor.models.whisper_utils import ISO639_1_SUPPORTED_LANGS

from vllm_davinci_testing.engines.model_zoo import (
    EOS_ID,
    NUM_BYTES,
    fill_with_normal_weights,
    write_tokenizer,
)

SAMPLING_RATE = 16000
SECONDS = 3  # every input is padded or cut to this length
POSITIONS = 150  # rows of the encoder's output, more than a cache block
START = "<|startoftranscript|>"
# In Whisper's order, after the bytes and every checkpoint's two special tokens.
SPECIAL = [
    START,
    "<|transcribe|>",
    "<|translate|>",
    "<|notimestamps|>",
    "<|prev|>",
    *(f"<|{language}|>" for language in ISO639_1_SUPPORTED_LANGS),
]
START_ID = NUM_BYTES + 2
VOCAB_SIZE = START_ID + len(SPECIAL)


def whisper_config() -> transformers.WhisperConfig:
    return transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=16,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        max_source_positions=POSITIONS,
        max_target_positions=448,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        decoder_start_token_id=START_ID,
    )


@torch.no_grad()
def _listen(network: transformers.WhisperForConditionalGeneration) -> None:
    """Scales weights so that tokens depend on audio and prompt; equal biases would dominate."""
    for module in network.modules():
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            module.bias.mul_(0.1)
    encoder, decoder = network.model.encoder, network.model.decoder
    for scaled in (encoder.conv1, encoder.conv2):
        scaled.weight.mul_(8)
    for scaled in (decoder.embed_tokens, decoder.embed_positions):
        scaled.weight.mul_(4)
    for layer in decoder.layers:
        layer.encoder_attn.q_proj.weight.mul_(3)
        layer.encoder_attn.out_proj.weight.mul_(3)


def write_whisper(directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and processor; returns the directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.WhisperForConditionalGeneration(whisper_config())
        fill_with_normal_weights(network)
        _listen(network)
    network.save_pretrained(directory)
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=SAMPLING_RATE, chunk_length=SECONDS
    ).save_pretrained(directory)
    # transformers' processor accepts any tokenizer, but saves only one of its class.
    (directory / "processor_config.json").write_text(
        json.dumps({"processor_class": "WhisperProcessor"})
    )
    return directory


def sound(seed: int, seconds: float = SECONDS) -> np.ndarray:
    """Makes a noisy chord of four tones, [samples] float32; the seed changes the pitch."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    tones = np.sin(2 * np.pi * generator.uniform(100, 4000, (4, 1)) * time).sum(0)
    mixed: np.ndarray = (0.2 * tones + 0.05 * generator.standard_normal(len(time))).astype("f4")
    return mixed
