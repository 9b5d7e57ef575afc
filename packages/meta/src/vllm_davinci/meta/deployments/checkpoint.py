"""The directory that a dry-run takes for a checkpoint: configuration and types, no weights."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.meta.deployments.table import Checkpoint

DESCRIPTION = "quant_model_description.json"
_FLOAT = "FLOAT"
_MLP = ("gate_proj", "up_proj", "down_proj")
# Models whose experts are named otherwise.
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3")),
    "minimax_m2": ("block_sparse_moe", ("w1", "w2", "w3")),
}


def write_checkpoint(checkpoint: Checkpoint, directory: Path) -> None:
    """Writes config.json, and ModelSlim's description where the checkpoint is quantized."""
    config = checkpoint.configuration()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if checkpoint.quantization:
        types = description(config, checkpoint.quantization)
        (directory / DESCRIPTION).write_text(json.dumps(types), encoding="utf-8")


def description(config: Mapping[str, Any], quantization: Mapping[str, str]) -> dict[str, str]:
    """ModelSlim's description: a type for the weight of each layer, and for its scales."""
    types = dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight"), _FLOAT)
    for layer in _linear_layers(config):
        kind = next(
            (kind for pattern, kind in quantization.items() if fnmatch.fnmatch(layer, pattern)),
            _FLOAT,
        )
        parts = ("weight",) if kind == _FLOAT else ("weight", "weight_scale", "weight_offset")
        types |= {f"{layer}.{part}": kind for part in parts}
    kinds = set(types.values()) - {_FLOAT}
    return {"model_quant_type": min(kinds, default=_FLOAT), **types}


def _linear_layers(config: Mapping[str, Any]) -> Iterator[str]:
    """Names of the layers with a product, as released checkpoints have them."""
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for part in _attention(config):
            yield f"{layer}.self_attn.{part}"
        if not _has_experts(config, number):
            yield from (f"{layer}.mlp.{part}" for part in _MLP)
            continue
        block, parts = _EXPERTS.get(config["model_type"], ("mlp", _MLP))
        yield f"{layer}.{block}.gate"
        if config.get("n_shared_experts"):
            yield from (f"{layer}.{block}.shared_experts.{part}" for part in _MLP)
        for expert in range(_num_experts(config)):
            yield from (f"{layer}.{block}.experts.{expert}.{part}" for part in parts)
    yield "lm_head"


def _attention(config: Mapping[str, Any]) -> tuple[str, ...]:
    if "kv_lora_rank" not in config:
        return ("q_proj", "k_proj", "v_proj", "o_proj")
    query = ("q_a_proj", "q_b_proj") if config.get("q_lora_rank") else ("q_proj",)
    return (*query, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def _num_experts(config: Mapping[str, Any]) -> int:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    if layer < config.get("first_k_dense_replace", 0) or layer in config.get("mlp_only_layers", ()):
        return False
    return _num_experts(config) > 0
