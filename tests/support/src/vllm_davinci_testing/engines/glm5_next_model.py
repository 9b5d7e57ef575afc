"""The smallest GLM-5.3-Flash: delta rules, and MLA to tokens of selected groups."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_davinci_testing.engines.compressed_zoo import INDEXED_STREAMS
from vllm_davinci_testing.engines.glm4v_model import PATCH

POOL = 16  # tokens per group
CHOSEN = 3  # groups that a query attends to, besides the open group

TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "indexer_types": ["full"] * 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 0,
    "v_head_dim": 48,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "index_kpool": POOL,
    "index_topk": CHOSEN * POOL,
    **INDEXED_STREAMS,
    "num_nextn_predict_layers": 1,
    # Released keys that only vLLM reads.
    "mhc": True,
    "mla_use_nope": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def glm5_next_config(
    text: Callable[..., dict[str, Any]], **tokens: int
) -> transformers.PretrainedConfig:
    """text: makes the text model's fields; tokens: ids of special tokens"""
    return transformers.Glm5NextConfig(
        text_config=text(vocab_size=max(tokens.values()) + 1, **TEXT),
        vision_config={
            "depth": 2,
            "hidden_size": 160,  # heads of 40
            "intermediate_size": 192,
            "num_heads": 4,
            "image_size": 6 * PATCH,
            "patch_size": PATCH,
            "out_hidden_size": 128,
            "projection_intermediate_size": 192,
            "rms_norm_eps": 1e-6,  # constant in vLLM's definition
        },
        **tokens,
    )


def glm5_next_processor(
    tokenizer: Any, patch: int, smallest: int, largest: int
) -> transformers.ProcessorMixin:
    """smallest, largest: number of an image's pixels"""
    # An image counts as two frames.
    size = {"shortest_edge": 2 * smallest, "longest_edge": 2 * largest}
    return transformers.Glm5NextProcessor(
        image_processor=transformers.Glm5NextImageProcessor(patch_size=patch, size=size),
        video_processor=transformers.Glm5NextVideoProcessor(patch_size=patch, size=size),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )


@torch.no_grad()
def fill_streams_and_pools(network: nn.Module) -> None:
    """Fills tensors that random weights leave neutral: streams, groups' gates, decays."""
    for name, tensor in network.named_parameters():
        part = name.rpartition(".")[2]
        if part in ("fn", "index_kpool_compress_gate"):
            tensor.normal_(std=0.5 / tensor.shape[1] ** 0.5)
        elif part in ("base", "index_kpool_compress_ape", "dt_bias", "A_log"):
            tensor.normal_(std=0.5)
        elif part == "scale":
            tensor.normal_(mean=1.0, std=0.1)
    for name, tensor in network.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)


def with_mtp(source: Path, destination: Path) -> Path:
    """Copies a checkpoint and adds an MTP layer after the last layer.

    The layer is a copy of the last one that also reads a little of the next token: some of its
        drafts are right.
    """
    shutil.copytree(source, destination)
    target = load_file(source / "model.safetensors")
    size, depth = TEXT["hidden_size"], TEXT["num_hidden_layers"]
    layers = "model.language_model.layers."
    last, own = f"{layers}{depth - 1}.", f"{layers}{depth}."
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    tensors = {
        name.replace(last, own): tensor.clone()
        for name, tensor in target.items()
        if name.startswith(last) and ".hc_" not in name
    }
    tensors |= {
        f"{own}enorm.weight": torch.ones(size),
        f"{own}hnorm.weight": torch.ones(size) + drawn(size),
        f"{own}eh_proj.weight": torch.cat(
            [drawn(size, size), torch.eye(size) + drawn(size, size)], dim=1
        ),
        f"{own}embed_tokens.weight": target["model.language_model.embed_tokens.weight"].clone(),
        f"{own}shared_head.norm.weight": target["model.language_model.norm.weight"].clone(),
        f"{own}shared_head.head.weight": target["lm_head.weight"].clone(),
    }
    save_file(tensors, destination / "mtp.safetensors", metadata={"format": "pt"})
    return destination
