"""int8 checkpoints: exports of float checkpoints, and changes to them for tests."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vllm_davinci.core.export.calibration import load_model, observe
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.export.smoothing import best_range
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.weight_files.files import QUANTIZED_INDEX_NAME

Quantize = Callable[..., Path]

WRITTEN = "quant_model_weights-*.safetensors"  # one input range for each file of the source

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def compressed_int8(is_static: bool = False) -> dict[str, Any]:
    """Returns config.json's section for compressed-tensors. is_static: one input scale per layer"""
    dynamic = {**_INT8, "strategy": "token", "dynamic": True}
    static = {**_INT8, "strategy": "tensor", "dynamic": False, "symmetric": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": static if is_static else dynamic,
            }
        },
    }


def input_ranges(source: Path, windows: list[torch.Tensor]) -> dict[str, InputRange]:
    """Returns linear layers' input ranges, without smoothing. windows: each int64 [1, tokens]"""
    model, static = load_model(source), find_scheme("W8A8", "all layers")
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    products = observe(model, names, windows, lambda count: None)
    return {
        name: best_range(product, product.weight(model), static)[0]
        for product in products.values()
        for name in product.layers
    }


def write_int8(
    source: Path,
    directory: Path,
    kind: str,
    calibration: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Exports a float checkpoint, with static layers' ranges from the tokens; returns the
    directory.
    """
    ranges = {}
    if kind == "W8A8":
        ranges = input_ranges(source, [torch.tensor([[*calibration]])])
    Exporter(source, directory, kind, dtype, ranges).run(lambda _: None)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of an exported checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob(WRITTEN)):
        found |= load_file(file)
    return found


def rewrite(
    directory: Path, tensors: dict[str, torch.Tensor], description: dict[str, Any] | None = None
) -> None:
    """Writes new tensors and description into an exported checkpoint, as one file."""
    (directory / QUANTIZED_INDEX_NAME).unlink(missing_ok=True)
    for file in directory.glob(WRITTEN):
        file.unlink()
    save_file(tensors, directory / WRITTEN.replace("*", "of-one"), metadata={"format": "pt"})
    if description is not None:
        (directory / DESCRIPTION).write_text(json.dumps(description))


def mixed(weight: Tensor) -> dict[str, Tensor]:
    """Quantizes a layer for prefill engines (a scale per token) and decode engines (one scale)."""
    layer = FloatLayer(weight, torch.bfloat16, inputs=InputRange(-6, 6))
    made = [find_scheme(kind, "p").rounded(layer) for kind in ("W8A8", "W8A8_DYNAMIC")]
    return made[0] | made[1]


def of_four_bits(weight: Tensor) -> dict[str, Tensor]:
    """Packs two rows' integers into each byte, with the term that products of int8 halves leave
    out.
    """
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 7).clamp_min(1e-8)
    integers = (wide / scale).round().to(torch.int8)
    return {
        "weight": (integers[0::2] & 15) | (integers[1::2] << 4),
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
        "scale_bias": 8 * integers.float().sum(1, keepdim=True) * scale,
    }


WRITERS: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "W8A8_MIX": mixed,
    "W4A8_DYNAMIC": of_four_bits,
}


def as_type(quantize: Quantize, source: Path, kind: str, only: str = "") -> Path:
    """Exports a float checkpoint; layers whose names contain `only` have another type."""
    directory = quantize(source, "W8A8_DYNAMIC", name=f"{source.name}-{kind}-{only}")
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    floats: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        floats |= load_file(file)
    for name in [name for name in tensors if name.endswith(".weight_scale") and only in name]:
        prefix = name.removesuffix(".weight_scale")
        for part in ("weight", "weight_scale", "weight_offset"):
            del tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"]
        for part, value in WRITERS[kind](floats[f"{prefix}.weight"]).items():
            tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"] = value, kind
    rewrite(directory, tensors, description)
    return directory
