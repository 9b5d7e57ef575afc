"""The product of int8 matrices: its operands after loading, and the launches around it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch_npu

from vllm_davinci.core.device.refusals import refusal_of
from vllm_davinci.core.errors import DeviceError, UnsupportedFeatureError
from vllm_davinci.core.layers.quantized_activation import InputScale, quantize
from vllm_davinci.core.quantization.scheme import Scheme, WeightSize

FRACTAL_NZ = 29  # aclFormat: 16 x 32 tiles, the matrix unit's own order


class QuantMatmul(NamedTuple):
    """Computes (integers @ weight + bias) * scale, times the rows' scales if they have any.

    weight:      [in_features, out_features] int8, also in the NZ layout
    scale:       [out_features] fp32; with an input_scale in an FP16 model: its bits as int64
    bias:        [out_features] int32, or None
    input_scale: quantizes the input; None if every row has its own scale
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    input_scale: InputScale | None

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantizes the input: int8 rows [num_tokens, in_features], and their scales.

        x: [..., in_features]. See `layers.quantized_activation.quantize`.
        """
        return quantize(x, self.input_scale)

    def quantizes_as(self, other: QuantMatmul) -> bool:
        """True if rows quantized for one product can be multiplied by the other."""
        return self.input_scale == other.input_scale


def per_token_quant_matmul(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """(integers of x * weight) * scales of x * weight_scale + bias, rounded once. Two launches.

    x:            [..., in_features]; quantized with a scale per row
    weight:       [in_features, out_features] int8
    weight_scale: [out_features] fp32
    bias:         [out_features], dtype of x, or None
    Returns [..., out_features] of the dtype of x.
    """
    integers, scales = quantize(x)
    result: torch.Tensor = torch_npu.npu_quant_matmul(
        integers, weight, weight_scale, pertoken_scale=scales, bias=bias, output_dtype=x.dtype
    )
    return result if x.dim() == 2 else result.view(*x.shape[:-1], -1)


class Int8Scheme(Scheme):
    """Base of the schemes with int8 products."""

    quantizes_input = True
    is_written = True

    def require_sizes(self, size: WeightSize) -> None:
        if not size.is_expert:
            require_sizes(size.prefix, size.in_features, size.out_features)


def require_sizes(prefix: str, in_features: int, out_features: int) -> None:
    """Raises UnsupportedFeatureError if the product does not support such a weight on a rank.

    prefix: name of the layer
    """
    for columns, rows in ((in_features, _SIDE), (_SIDE, out_features)):
        if (said := _refusal_of_weight(columns, rows)) is not None:
            raise UnsupportedFeatureError(
                f"{prefix} has an int8 weight of {in_features} x {out_features} on each rank, "
                "which the product of this device and CANN does not support. Start with a larger "
                f"--tensor-parallel-size. It says: {said}"
            )


# Size of the side that is not tested, small to save memory.
_SIDE = 32


@functools.cache
def _refusal_of_weight(in_features: int, out_features: int) -> str | None:
    new = functools.partial(torch.zeros, dtype=torch.int8, device="npu")
    return refusal_of(
        lambda: torch_npu.npu_quant_matmul(
            new(1, in_features),
            new(out_features, in_features).t(),
            new(out_features, dtype=torch.float32),
            output_dtype=torch.int32,
        )
    )


def arrange_weight(parameter: torch.nn.Parameter | torch.Tensor, use_nz: bool) -> torch.Tensor:
    """Lays a weight out for the product: [..., in, out].

    parameter: [..., out, in] int8; keeps its shape, and with `use_nz` becomes a view of the result,
               so that no second copy remains
    Returns a view of the same memory, or with `use_nz` of a copy in the NZ layout. Raises
    DeviceError if the chip's libraries do not convert.
    """
    transposed = parameter.detach().as_subclass(torch.Tensor).transpose(-1, -2)
    if not use_nz:
        return transposed
    reason = "they leave it in plain order"
    try:
        tiles = _in_tiles(transposed.contiguous())
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
    else:
        if torch_npu.get_npu_format(tiles) == FRACTAL_NZ:
            parameter.data = tiles.transpose(-1, -2)
            return tiles
    raise DeviceError(
        "additional_config key 'enable_weight_nz_layout' is true, and this device's libraries "
        f"do not convert an int8 weight {list(transposed.mT.shape)} to the NZ layout: {reason}. "
        "Remove the key; the products take plain weights, too."
    )


def _in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """A copy in the NZ layout. torch_npu makes such tensors only while a global flag is set."""
    torch_npu.npu.set_option({"ALLOW_INTERNAL_FORMAT": "enable"})
    try:
        tiles: torch.Tensor = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
        torch.accelerator.synchronize()  # the next wait raises an error of the conversion
    finally:
        torch_npu.npu.set_option({"ALLOW_INTERNAL_FORMAT": "disable"})
    return tiles
