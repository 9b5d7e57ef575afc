"""The product of int8 weights with tokens that get a scale each when they come."""

from __future__ import annotations

import torch
import torch_npu


def dynamic_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Quantizes every token with its own scale, then `scaled_product`. Two launches.

    x: [..., in_features]. Returns [..., out_features] of the same dtype.
    """
    integers, scales = torch_npu.npu_dynamic_quant(x.reshape(-1, x.shape[-1]))
    result = scaled_product(integers, scales, weight, weight_scale, bias, x.dtype)
    return result.view(*x.shape[:-1], -1)


def scaled_product(
    integers: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """integers * weight, scaled by row and by column, plus bias; rounded once, to `dtype`.

    integers:     [num_tokens, in_features] int8
    scales:       [num_tokens] fp32
    weight:       [in_features, out_features] int8
    weight_scale: [out_features] fp32
    Returns [num_tokens, out_features].
    """
    result: torch.Tensor = torch_npu.npu_quant_matmul(
        integers, weight, weight_scale, pertoken_scale=scales, bias=bias, output_dtype=dtype
    )
    return result
