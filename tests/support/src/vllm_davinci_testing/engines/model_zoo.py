"""Small checkpoints with random weights that together cover every property.

Weights are as large as trained weights, so that any error changes the tokens: with the usual tiny
initial weights, a model repeats its input whatever attention computes.
"""

import math
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from vllm_davinci_testing.engines.compressed_zoo import COMPRESSED, fill_streams_and_tables, release
from vllm_davinci_testing.engines.deepseek_zoo import DEEPSEEK, HEADS6, HEADS128
from vllm_davinci_testing.engines.hy_v4_checkpoint import HY_V4, release_hy_v4
from vllm_davinci_testing.engines.hybrid_zoo import HYBRIDS
from vllm_davinci_testing.engines.mixture_zoo import MIXTURES
from vllm_davinci_testing.engines.sparse_zoo import ALL_CHOSEN, SPARSE
from vllm_davinci_testing.engines.zoo_model import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    NUM_BYTES,
    VOCAB_SIZE,
    ZooModel,
)

__all__ = ["BOS", "BOS_ID", "EOS", "EOS_ID", "NUM_BYTES", "VOCAB_SIZE", "ZooModel"]

# Required properties: the four families, tied and untied embeddings, head sizes 64, 80 and 128, 1,
# 2, 4 and 8 queries per key-value head, a window shorter than the sequences.
ZOO = (
    ZooModel("llama_head64_gqa4", "llama", 8, 2, 64),
    ZooModel("llama_head128_mha_tied", "llama", 2, 2, 128, tied=True),
    ZooModel(
        *("llama3_rope_head80_gqa4", "llama", 4, 1, 80),
        hidden_size=320,
        options={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    ZooModel("qwen2_bias_head64_gqa8_tied", "qwen2", 8, 1, 64, hidden_size=512, tied=True),
    ZooModel("qwen2_bias_head128_gqa2", "qwen2", 4, 2, 128, hidden_size=512),
    ZooModel("qwen3_norm_head128_gqa2", "qwen3", 4, 2, 128),
    ZooModel("qwen3_norm_head64_gqa8_tied", "qwen3", 8, 1, 64, tied=True),
    ZooModel(
        *("mistral_window32_head80_gqa2", "mistral", 4, 2, 80),
        hidden_size=320,
        options={"sliding_window": 32},
    ),
    ZooModel(
        *("mistral_window48_head64_gqa4_tied", "mistral", 8, 2, 64),
        tied=True,
        options={"sliding_window": 48},
    ),
)


EVERY = (
    *(*ZOO, *DEEPSEEK, HEADS6, HEADS128, *MIXTURES, *HYBRIDS),
    *(*SPARSE, ALL_CHOSEN, *COMPRESSED, HY_V4),
)
# Models whose released tensor names differ from those that transformers writes.
RELEASED = {
    **dict.fromkeys((model.name for model in COMPRESSED), release),
    HY_V4.name: release_hy_v4,
}
BY_NAME = {model.name: model for model in EVERY}


def write_checkpoint(model: ZooModel, directory: Path) -> Path:
    """Writes configuration, fp32 weights and tokenizer with transformers; returns the directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        network = transformers.AutoModelForCausalLM.from_config(model.config(), dtype=torch.float32)
        fill_with_normal_weights(network)
        if model.name in RELEASED:
            fill_streams_and_tables(network)
    network.save_pretrained(directory)
    if model.name in RELEASED:
        RELEASED[model.name](directory, model.options)
    write_tokenizer(directory)
    return directory


# Tokens with non-finite embeddings, and a token that alone is routed to an expert with such
# weights.
NAN_TOKEN, INFINITE_TOKEN, MISROUTED_TOKEN = 250, 251, 252
POISONS = (NAN_TOKEN, INFINITE_TOKEN, MISROUTED_TOKEN)
POISONED_EXPERT = 3


@torch.no_grad()
def write_poisoned(source: Path, directory: Path) -> Path:
    """Adds POISONS and POISONED_EXPERT to a checkpoint's mixture of experts."""
    network = transformers.AutoModelForCausalLM.from_pretrained(source)
    layer = network.model.layers[0]
    embeddings = network.model.embed_tokens.weight
    # Before the router only embeddings change two channels: one is equal for all tokens and keeps
    # them away from the expert; the other belongs to this token and routes it there.
    embeddings[:, 0], embeddings[:, 1] = 0, 1
    layer.self_attn.o_proj.weight[:2] = 0
    router = layer.mlp.gate.weight
    router[POISONED_EXPERT] = 0
    router[POISONED_EXPERT, 0], router[POISONED_EXPERT, 1] = 8, -4
    embeddings[MISROUTED_TOKEN, 0] = 4
    layer.mlp.experts.down_proj[POISONED_EXPERT] = float("nan")
    embeddings[NAN_TOKEN] = float("nan")
    embeddings[INFINITE_TOKEN] = float("inf")
    network.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def fill_with_normal_weights(network: nn.Module) -> None:
    """Fills matrices with a gain of 1.2; norms and biases differ between channels."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            # An embedding's row has the scale of a projection's input.
            module.weight.normal_(std=1.2 / math.sqrt(module.weight.shape[1]))
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.normal_(std=0.3)
        elif module.__class__.__name__.endswith(("Experts", "Router")):
            for weight in module.parameters():  # [experts, out, in], or [experts, in]
                weight.normal_(std=1.2 / math.sqrt(weight.shape[-1]))
            for bias in module.buffers():  # selection bias, small relative to scores of 0 to 1
                if bias.is_floating_point():  # not a token-to-expert table
                    bias.normal_(std=0.05)
        elif (
            module.__class__.__name__.endswith("Norm")
            and getattr(module, "weight", None) is not None
        ):
            module.weight.normal_(mean=1.0, std=0.1)
            if getattr(module, "bias", None) is not None:
                module.bias.normal_(std=0.1)
        if getattr(module, "sinks", None) is not None:  # sinks: attention scores without values
            module.sinks.normal_(mean=1.0)


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with a token per byte, so that text and tokens map to each other."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: index for index, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS
    ).save_pretrained(directory)
