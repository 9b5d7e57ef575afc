"""A checkpoint with block-wise fp8 weights, rounded by transformers' own operation."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from vllm_davinci_testing.engines.deepseek_zoo import small_deepseek

BLOCK = (128, 128)
PROJECTIONS = re.compile(r"_proj\.weight$|kv_a_proj")
# As released, of Qwen3.8-Flash-Next only routed experts and rows of n-grams, with one scale.
EXPERTS = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")
ROWS = re.compile(r"(.*\.ngram_embedding)\.shard_\d+\.weight$")
ROW_SCALE = 0.000199  # as released


def deepseek_of_blocks(**fields: Any) -> DeepseekV3Config:
    """Makes a small DeepSeek-V3; most matrices divide into blocks. fields: values to change"""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    }
    return small_deepseek(**{**sizes, **fields})


def write_block_fp8(
    source: Path, directory: Path, num_shards: int = 2, rounded: re.Pattern[str] = PROJECTIONS
) -> Path:
    """Rounds the named weights, with sizes divisible by 128, and rows of n-grams to fp8.

    source: a float checkpoint. A weight and its scales may be in different shards.
    """
    shutil.copytree(source, directory)
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    config = FineGrainedFP8Config(weight_block_size=BLOCK)
    operation = Fp8Quantize(SimpleNamespace(quantization_config=config))
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if rounded.search(name):
            made |= operation.convert({name: tensor})
        elif table := ROWS.match(name):
            made[name] = (tensor.float() / ROW_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
            made[f"{table[1]}.weight_scale"] = torch.tensor([ROW_SCALE]).bfloat16()
        else:
            made[name] = tensor
    places = {name: f"model-{number % num_shards + 1:05d}-of-{num_shards:05d}.safetensors"
              for number, name in enumerate(sorted(made))}  # fmt: skip
    for file in sorted(set(places.values())):
        part = {name: made[name].contiguous() for name in made if places[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    content = json.loads((directory / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def dequantized(directory: Path) -> dict[str, torch.Tensor]:
    """Dequantizes all tensors to fp32 by transformers' own operation."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= load_file(path)
    config = FineGrainedFP8Config(weight_block_size=BLOCK)
    operation = Fp8Dequantize(SimpleNamespace(quantization_config=config))
    found = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale_inv", ".weight_scale")):
            continue
        if table := ROWS.match(name):
            tensor = tensor.float() * stored[f"{table[1]}.weight_scale"].float()
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = operation._dequantize_one(tensor, stored[f"{name}_scale_inv"], torch.float32)
        found[name] = tensor
    return found
