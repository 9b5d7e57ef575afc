"""From what a quantized checkpoint holds to what its layers load, tensor by tensor.

Checkpoints of ModelSlim's types and generations are turned into the types of LINEAR_TENSORS while
they are read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from vllm_davinci.core.checkpoint.rounding import dynamic_tensors
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.block_fp8 import DTYPE as FP8
from vllm_davinci.core.quantization.block_fp8 import Block, as_floats, dequantized, require_scale
from vllm_davinci.core.quantization.description import (
    WEIGHT_ONLY,
    WRAPPED_NORM,
    QuantDescription,
    QuantType,
)
from vllm_davinci.core.quantization.tensors import deq_scale_as_float
from vllm_davinci.core.quantization.weight_only import packed_columns

Weights = Iterable[tuple[str, torch.Tensor]]

SCALES = frozenset({"weight_scale", "input_scale", "deq_scale", "weight_scale_inv", "scales"})
# Type in the checkpoint -> tensors of its layers that the computation does not need.
LEFT_OUT: dict[str, frozenset[str]] = {
    "W8A8": frozenset({"weight_scale", "weight_offset"}),  # the weight's share of deq_scale
    "W8A8_MIX": frozenset({"quant_bias", "input_scale", "input_offset", "deq_scale"}),
    "W4A8_DYNAMIC": frozenset({"scale_bias"}),  # a correction for products of halves of int8
}


def converted(
    weights: Weights, description: QuantDescription
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the model's loader takes, in place of those in the files.

    Raises UnsupportedFeatureError for asymmetric weights.
    """
    wrapped_norms = {
        match["norm"] for name in description.types if (match := WRAPPED_NORM.match(name))
    }
    for name, tensor in weights:
        prefix, _, part = name.rpartition(".")
        if match := WRAPPED_NORM.match(name):
            yield f"{match['norm']}.{match['part']}", tensor
            continue
        if prefix in wrapped_norms and part in ("weight", "bias"):
            continue  # the same values once more
        kind = description.types.get(f"{prefix}.weight", "")
        if part in LEFT_OUT.get(kind, ()):
            if part == "weight_offset" and bool(tensor.any()):
                raise UnsupportedFeatureError(
                    f"{name} is not zero: the weight is asymmetric, and {kind} multiplies "
                    "symmetric ones. Export the model with symmetric weights."
                )
            continue
        if kind == "W4A8_DYNAMIC" and part == "weight":
            tensor = unpacked_rows(tensor)
        if kind in WEIGHT_ONLY:
            tensor = _of_weight_only(part, tensor, kind, description)
        yield name, tensor


def _of_weight_only(
    part: str, tensor: torch.Tensor, kind: str, description: QuantDescription
) -> torch.Tensor:
    """A tensor of W8A16 or W4A16 as LINEAR_TENSORS has it."""
    if part in ("weight_scale", "weight_offset") and tensor.dim() == 1:
        return tensor.unsqueeze(1)
    if kind != QuantType.W4A16.value or part != "weight":
        return tensor
    if not description.version:
        return packed_columns(tensor)
    # Where scales have groups, two rows lie in a byte.
    return packed_columns(unpacked_rows(tensor)) if description.group_size else tensor


def from_block_fp8(
    weights: Weights, block: Block, dtype: torch.dtype, types: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """fp8 weights as floats, or as the tensors of W8A8_DYNAMIC. A weight waits for its scales.

    dtype: of the model
    types: name of a weight -> what it becomes; floats without an entry
    Raises CheckpointError where a weight or its scales do not come.
    """
    waiting: dict[str, torch.Tensor] = {}
    # Whoever reads has one weight in hand while the next is made, which gets the other's memory.
    spares: deque[torch.Tensor] = deque(maxlen=2)
    for name, tensor in weights:
        key = name.removesuffix("_scale_inv")
        if key == name and tensor.dtype != FP8:
            yield name, tensor
            continue
        if key not in waiting:
            waiting[key] = tensor
            continue
        one, other = waiting.pop(key), tensor
        weight, scale = (other, one) if key == name else (one, other)
        require_scale(key, weight, scale, block)
        if types.get(key) != QuantType.W8A8_DYNAMIC.value:
            floats = as_floats(weight, scale, block, dtype, list(spares))
            _keep(spares, floats)
            yield key, floats
            continue
        prefix = key.removesuffix(".weight")
        made = dynamic_tensors_of_fp8(weight, scale, block, list(spares))
        _keep(spares, made["weight"])
        for part, values in made.items():
            yield f"{prefix}.{part}", values
    for key, tensor in waiting.items():
        if tensor.dtype == FP8:
            require_scale(key, tensor, None, block)
        raise CheckpointError(
            f"{key}_scale_inv is there, and no fp8 tensor {key}: the scales would be left out. "
            "Copy the rest of the checkpoint."
        )


def _keep(spares: deque[torch.Tensor], made: torch.Tensor) -> None:
    """Keeps the memory of a tensor that has one of its own, in place of the oldest."""
    if all(made.data_ptr() != spare.data_ptr() for spare in spares):
        spares.append(made.data)  # no view, which would keep the tensor that it is one of


def dynamic_tensors_of_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: Block,
    spares: Sequence[torch.Tensor] = (),
) -> dict[str, torch.Tensor]:
    """The tensors of W8A8_DYNAMIC, rounded from the values that the fp8 weight stands for.

    spares: as for `as_floats`
    """
    if convert := fused_op("block_fp8_integers"):
        integers, weight_scale = convert(weight, scale, block.rows, block.columns, spares)
    else:
        integers = torch.empty(weight.shape, dtype=torch.int8)
        weight_scale = torch.empty(weight.shape[0], 1)
        for rows, values in dequantized(weight, scale, block):
            made = dynamic_tensors(values)
            integers[rows], weight_scale[rows] = made["weight"], made["weight_scale"]
    return {
        "weight": integers,
        "weight_scale": weight_scale,
        "weight_offset": torch.zeros_like(weight_scale),
    }


def require_usable(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError for a scale that is zero, negative or not finite, and for an offset
    that is no int8."""
    part = name.rpartition(".")[2]
    if part == "input_offset":
        values = tensor.float()
        is_good = (values == values.round()) & (values >= -128) & (values <= 127)
        must = "integers from -128 to 127"
    elif part in SCALES:
        values = deq_scale_as_float(tensor).float()
        low, high = (float(end) for end in values.aminmax())
        if low > 0 and math.isfinite(high):
            return
        is_good, must = values.isfinite() & (values > 0), "positive numbers"
    else:
        return
    if bad := int((~is_good).sum()):
        raise CheckpointError(
            f"{name} holds {float(values[~is_good][0])} ({bad} of {values.numel()} entries are "
            f"out of range) and must hold {must}. Copy the file again, or export the model again."
        )


def unpacked_rows(packed: torch.Tensor) -> torch.Tensor:
    """4-bit integers, of which a byte has those of two rows, the first in its low half.

    packed: [out / 2, in] int8
    Returns [out, in] int8, from -8 to 7.
    """
    low, high = (packed << 4) >> 4, packed >> 4  # int8 keeps its sign
    return torch.stack((low, high), dim=1).flatten(0, 1)
