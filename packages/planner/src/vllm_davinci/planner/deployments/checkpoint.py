"""Writes a checkpoint directory for dry-runs: configuration and types, no weights."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.planner.deployments.table import Checkpoint

DESCRIPTION = "quant_model_description.json"
_FLOAT = "FLOAT"
_PACKED = "pack-quantized"  # format of compressed-tensors, recognized by its tensors' names
_ITEM_BYTES = {"I32": 4, "BF16": 2, "I64": 8}
_MLP = ("gate_proj", "up_proj", "down_proj")
# Models that name their experts differently.
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w2", "w3")),
    "minimax_m2": ("block_sparse_moe", ("w1", "w2", "w3")),
    "minimax_m3_vl_text": ("block_sparse_moe", ("w1", "w2", "w3")),
    "kimi_linear": ("block_sparse_moe", ("w1", "w2", "w3")),
}
# Prefix of the text model's layers in multimodal models, if it is not "model.language_model".
_TEXT = dict.fromkeys(("minimax_m3_vl", "kimi_k3"), "language_model.model")


def write_checkpoint(checkpoint: Checkpoint, directory: Path) -> None:
    """Writes config.json, and ModelSlim's description if the checkpoint is quantized."""
    config = checkpoint.configuration()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if checkpoint.quantization:
        types = description(config, checkpoint.quantization)
        (directory / DESCRIPTION).write_text(json.dumps(types), encoding="utf-8")
    if config.get("quantization_config", {}).get("format") == _PACKED:
        _write_headers(_packed_experts(config), directory / "model.safetensors")


def _packed_experts(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of the experts' tensors; in released models only experts are packed."""
    (group,) = config["quantization_config"]["config_groups"].values()
    bits, group_size = group["weights"]["num_bits"], group["weights"]["group_size"]
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = dict.fromkeys(_MLP, (inner, hidden)) | {"down_proj": (hidden, inner)}
    for layer in _linear_layers(config):
        if ".experts." in layer:
            rows, columns = shapes[layer.rpartition(".")[2]]
            yield f"{layer}.weight_packed", "I32", (rows, columns * bits // 32)
            yield f"{layer}.weight_scale", "BF16", (rows, columns // group_size)
            yield f"{layer}.weight_shape", "I64", (2,)


def _write_headers(tensors: Iterable[tuple[str, str, tuple[int, ...]]], path: Path) -> None:
    """Writes a sparse safetensors file: its tensors take no disk space and are never read."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


def description(config: Mapping[str, Any], quantization: Mapping[str, str]) -> dict[str, str]:
    """Builds ModelSlim's description: the type of each layer's weight and scales."""
    prefix = "" if "compress_ratios" in config else f"{_text_prefix(config)}."
    outer = ("embed", "norm") if "compress_ratios" in config else ("embed_tokens", "norm")
    types = dict.fromkeys((f"{prefix}{name}.weight" for name in outer), _FLOAT)
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
    """Names of the layers with a matrix product, as in released checkpoints.

    MTP layers come last; their projections of embedding and hidden state are floats, which need no
    entry.
    """
    if "compress_ratios" in config:
        yield from _released_layers(config)
        return
    prefix, config = _text_prefix(config), config.get("text_config", config)
    for number in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        layer = f"{prefix}.layers.{number}"
        for part in _attention(config, number):
            yield f"{layer}.self_attn.{part}"
        if not _has_experts(config, number):
            yield from (f"{layer}.mlp.{part}" for part in _MLP)
            continue
        block, parts = _EXPERTS.get(config["model_type"], ("mlp", _MLP))
        yield f"{layer}.{block}.gate"
        if config.get("n_shared_experts") or config.get("num_shared_experts"):
            yield from (f"{layer}.{block}.shared_experts.{part}" for part in _MLP)
        for expert in range(_num_experts(config)):
            yield from (f"{layer}.{block}.experts.{expert}.{part}" for part in parts)
    yield prefix.replace(".model", ".lm_head") if prefix in _TEXT.values() else "lm_head"


def _released_layers(config: Mapping[str, Any]) -> Iterator[str]:
    """Names of DeepSeek-V4's layers; those of attention depend on its compression ratios."""
    experts = [f"experts.{number}" for number in range(config["n_routed_experts"])]
    pooled = ("compressor.wkv", "compressor.wgate")
    for number, ratio in enumerate(config["compress_ratios"]):
        beyond = number - config["num_hidden_layers"]
        layer = f"layers.{number}" if beyond < 0 else f"mtp.{beyond}"
        parts = ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", *(pooled if ratio > 1 else ())]
        if ratio == min(filter(None, config["compress_ratios"])):
            parts += [f"indexer.{part}" for part in ("wq_b", "weights_proj", *pooled)]
        yield from (f"{layer}.attn.{part}" for part in parts)
        yield f"{layer}.ffn.gate"
        for block in ("shared_experts", *experts):
            yield from (f"{layer}.ffn.{block}.{part}" for part in ("w1", "w2", "w3"))
    yield "head"


def _text_prefix(config: Mapping[str, Any]) -> str:
    """The prefix of a layer's name, which differs for models with images."""
    inside = _TEXT.get(config["model_type"], "model.language_model")
    return inside if "text_config" in config else "model"


def _attention(config: Mapping[str, Any], layer: int) -> tuple[str, ...]:
    if config.get("layer_types", ())[layer : layer + 1] == ["linear_attention"]:
        return (
            "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
            "o_proj",
        )  # fmt: skip
    if layer + 1 in config.get("linear_attn_config", {}).get("kda_layers", ()):
        return ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_proj", "o_proj")
    index: tuple[str, ...]
    if "kv_lora_rank" not in config:
        chooses_blocks = "sparse_attention_config" in config and _has_experts(config, layer)
        index = ("index_q_proj", "index_k_proj") if chooses_blocks else ()
        return ("q_proj", "k_proj", "v_proj", "o_proj", *index)
    query = ("q_a_proj", "q_b_proj") if config.get("q_lora_rank") else ("q_proj",)
    chooses = "index_kpool" in config
    index = tuple(f"indexer.{part}" for part in ("wq_b", "wk", "weights_proj") if chooses)
    gate = ("g_proj",) * bool(config.get("mla_use_output_gate"))
    return (*query, "kv_a_proj_with_mqa", "kv_b_proj", *index, *gate, "o_proj")


def _num_experts(config: Mapping[str, Any]) -> int:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    kinds = config.get("mlp_layer_types") or config.get("moe_layer_freq")
    if isinstance(kinds, list) and kinds[layer : layer + 1] in (["dense"], [0]):
        return False
    if layer < config.get("first_k_dense_replace", 0) or layer in config.get("mlp_only_layers", ()):
        return False
    return _num_experts(config) > 0
