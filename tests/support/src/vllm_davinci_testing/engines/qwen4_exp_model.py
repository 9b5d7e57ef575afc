"""The smallest Qwen3.8-Flash-Next: delta rules with n-gram tables, selected groups of keys."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_davinci_testing.engines.hybrid_zoo import EXPERTS_OF_QWEN, GATED_DELTA_NET

GROUP = 16  # tokens per group
CHOSEN = 3  # groups that a query attends to, besides the open group

TEXT: dict[str, Any] = {
    **GATED_DELTA_NET,
    **EXPERTS_OF_QWEN,
    "moe_intermediate_size": 128,  # fp8 weights have blocks of 128
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "hidden_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "output_gate_type": "sigmoid",
    "mtp_num_hidden_layers": 1,
    "hc_count": 4,
    "hc_lowrank": 24,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 90,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 5,
    # With fewer heads, all products of a key may be negative, and many keys score 0.
    "indexer_n_heads": 32,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,  # the graphs' operator requires it
    "indexer_budget": CHOSEN * GROUP,
    "indexer_compress_ratio": GROUP,
}


def qwen4_exp_config(
    text: Callable[..., dict[str, Any]], patch: int, **tokens: int
) -> transformers.PretrainedConfig:
    """text: makes the text model's fields; tokens: ids of special tokens"""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    return transformers.Qwen4ExpConfig(
        text_config=text(rope_parameters=rope, **TEXT),
        vision_config={
            "depth": 2,
            "hidden_size": 160,  # heads of 40
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": patch,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
        },
        **tokens,
    )


@torch.no_grad()
def fill_convolutions(network: nn.Module) -> None:
    """Fills tensors that random weights leave neutral: n-grams' convolutions, decays."""
    for name, tensor in network.named_parameters():
        if name.endswith("ple.conv1d.weight") or name.rpartition(".")[2] in ("dt_bias", "A_log"):
            tensor.normal_(std=0.5)


def with_mtp(source: Path, destination: Path) -> Path:
    """Copies a checkpoint and adds an MTP layer.

    The layer is a copy of the last one that also reads a little of the next token: some of its
    drafts are right.
    """
    shutil.copytree(source, destination)
    target = load_file(source / "model.safetensors")
    size, depth = TEXT["hidden_size"], TEXT["num_hidden_layers"]
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    text = "model.language_model."
    tensors = {
        name.replace(text, "mtp.").replace(f"layers.{depth - 1}.", "layers.0."): tensor.clone()
        for name, tensor in target.items()
        if name.startswith((f"{text}layers.{depth - 1}.", f"{text}hyper_connection_mixer."))
    }
    tensors |= {
        "mtp.fc_embedding.weight": drawn(size, size),
        "mtp.fc_hidden.weight": torch.eye(size) + drawn(size, size),
        "mtp.pre_fc_norm_embedding.weight": drawn(size),
        "mtp.pre_fc_norm_hidden.weight": drawn(TEXT["hc_count"] * size),
    }
    save_file(tensors, destination / "mtp.safetensors", metadata={"format": "pt"})
    return destination
