"""Checkpoints with packed integers, and the equivalent floats."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
DESCRIPTION = "quant_model_description.json"
# AWQ's order of eight adjacent values, from the lowest bits.
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Integers:
    """A weight [out, in] in unsigned integers.

    values: [out, in]; zeros: [out, groups], integers that mean 0; scale: [out, groups] fp16
    """

    values: Tensor
    zeros: Tensor
    scale: Tensor
    bits: int

    @classmethod
    def of(cls, weight: Tensor, bits: int, group_size: int, is_symmetric: bool) -> Integers:
        wide = weight.float().unflatten(1, (-1, group_size or weight.shape[1]))
        most, half = 2**bits - 1, 2 ** (bits - 1)
        if is_symmetric:
            scale = (wide.abs().amax(2) / (half - 1)).clamp_min(1e-5).half()
            zeros = torch.full(scale.shape, half)
        else:
            low, high = wide.amin(2).clamp_max(0), wide.amax(2).clamp_min(0)
            scale = ((high - low) / most).clamp_min(1e-5).half()
            zeros = (-low / scale.float()).round().clamp(0, most).long()
        values = (wide / scale.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
        return cls(values.clamp(0, most).long().flatten(1), zeros, scale, bits)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Returns [out, in]; each value is rounded to `dtype` as in the product."""
        wide = self.values.unflatten(1, (self.zeros.shape[1], -1)) - self.zeros.unsqueeze(2)
        return (wide * self.scale.to(dtype).float().unsqueeze(2)).to(dtype).flatten(1)


def packed(values: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Packs unsigned integers [rows, columns] into int32 [rows, columns * bits / 32].

    places: order of an int32's elements, from the lowest bits
    """
    each = 32 // bits
    order = places or tuple(range(each))
    result = torch.zeros(values.shape[0], values.shape[1] // each, dtype=torch.int64)
    for place, neighbour in enumerate(order):
        result |= values[:, neighbour::each].long() << (bits * place)
    return torch.where(result >= 1 << 31, result - (1 << 32), result).to(torch.int32)


def tensors_of(method: str, made: Integers, prefix: str) -> dict[str, Tensor]:
    """Returns a layer's tensors in a format; "ascend" is ModelSlim's."""
    bits, half = made.bits, 2 ** (made.bits - 1)
    if method == "awq":
        own = {
            "qweight": packed(made.values.t(), bits, AWQ_PLACES),
            "scales": made.scale.t(),
            "qzeros": packed(made.zeros.t(), bits, AWQ_PLACES),
        }
    elif method == "gptq":
        in_features, groups = made.values.shape[1], made.scale.shape[1]
        is_first = not bool((made.zeros != half).any())  # this format has no zero point of 0
        own = {
            "qweight": packed(made.values, bits).t(),
            "scales": made.scale.t(),
            "qzeros": packed(made.zeros.t() - int(is_first), bits),
            "g_idx": (torch.arange(in_features) // (in_features // groups)).int(),
        }
    elif method == "compressed-tensors":
        signed = (made.values - half).to(torch.int8)
        own = {
            "weight_packed": pack_to_int32(signed, bits),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(signed.shape),
        }
        if bool((made.zeros != half).any()):
            zeros = (made.zeros - half).to(torch.int8)
            own["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
    else:
        signed = (made.values - half).to(torch.int8)
        if bits == 4 and made.scale.shape[1] > 1:  # two rows per byte
            signed = (signed[0::2] & 15) | (signed[1::2] << 4)
        elif bits == 4:
            signed = (signed[:, 0::2] & 15) | (signed[:, 1::2] << 4)
        own = {
            "weight": signed,
            "weight_scale": made.scale.float(),
            "weight_offset": (made.zeros - half).float(),
        }
    return {f"{prefix}.{name}": tensor.contiguous() for name, tensor in own.items()}


def settings_of(method: str, bits: int, group_size: int, is_symmetric: bool) -> dict[str, Any]:
    """Returns `quantization_config` of config.json."""
    if method == "awq":
        return {
            "quant_method": "awq", "bits": bits, "group_size": group_size or -1,
            "zero_point": True, "version": "gemm", "modules_to_not_convert": None,
        }  # fmt: skip
    if method == "gptq":
        return {
            "quant_method": "gptq", "bits": bits, "group_size": group_size or -1,
            "desc_act": False, "sym": is_symmetric, "lm_head": False,
            "checkpoint_format": "gptq" if is_symmetric else "gptq_v2",
        }  # fmt: skip
    weights = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric, "dynamic": False,
        "strategy": "group" if group_size else "channel", "group_size": group_size or None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def write_packed(
    source: Path,
    directory: Path,
    method: str,
    bits: int = 4,
    group_size: int = 32,
    is_symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Path, Path]:
    """Quantizes the projections of a float checkpoint in one file.

    method:     awq, gptq, compressed-tensors, or ascend for ModelSlim's
    group_size: inputs that share a scale; 0: all Returns this checkpoint, and one with the
    equivalent floats.
    """
    integers, floats = directory / "integers", directory / "floats"
    for target in (integers, floats):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored, values, types = {}, {}, {}
    kind = f"W{bits}A16"
    for name, tensor in load_file(source / WEIGHTS).items():
        prefix = name.removesuffix(".weight")
        if not prefix.endswith(("_proj", "_with_mqa")):
            stored[name] = values[name] = tensor.to(dtype)
            types[name] = "FLOAT"
            continue
        made = Integers.of(tensor, bits, group_size, is_symmetric)
        own = tensors_of(method, made, prefix)
        stored |= own
        types |= dict.fromkeys(own, kind)
        values[name] = made.floats(dtype)
    save_file(values, floats / WEIGHTS, metadata={"format": "pt"})
    save_file(stored, integers / WEIGHTS, metadata={"format": "pt"})
    if method == "ascend":
        options = {"version": "1.0.0", "group_size": group_size, "model_quant_type": kind}
        (integers / DESCRIPTION).write_text(json.dumps({**types, **options}))
        return integers, floats
    config = json.loads((integers / "config.json").read_text())
    config["quantization_config"] = settings_of(method, bits, group_size, is_symmetric)
    (integers / "config.json").write_text(json.dumps(config))
    return integers, floats
