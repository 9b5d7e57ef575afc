"""Products of 16-bit rows with integer weights, which the operator converts to 16-bit floats.

y = x @ ((weight + offset) * scale) + bias, where (weight + offset) * scale is rounded to the dtype
of x and sums are fp32. A checkpoint's offset has the other sign: (weight - weight_offset) *
weight_scale. Limits: aclnnWeightQuantBatchMatmulV2 on Atlas A2 and A3.
"""

from typing import NamedTuple

import torch
import torch_npu

from vllm_davinci.core.errors import UnsupportedFeatureError

WAY_OUT = (
    "Quantize the model again with other groups, or run vllm-davinci quantize on its float "
    "checkpoint"
)
_LARGEST = 65535
_GROUP_UNIT = 32
_PACKED = 8  # 4-bit integers per int32
_LARGEST_OFFSET = 256  # bf16 holds every integer up to this one


def refusal_of_groups(group_size: int) -> str | None:
    """The reason why the operator does not support groups of that size, or None.

    group_size: input entries that share a scale; 0: all
    """
    if group_size and (group_size < _GROUP_UNIT or group_size % _GROUP_UNIT):
        return (
            f"a scale per {group_size} entries of a weight is not supported; use a multiple of "
            f"{_GROUP_UNIT}, or one per channel"
        )
    return None


def refusal(
    bits: int, group_size: int, in_features: int, out_features: int, is_expert: bool = False
) -> str | None:
    """The reason why the operators do not support a rank's weight of these sizes, or None."""
    if reason := refusal_of_groups(group_size):
        return reason
    if group_size and in_features % group_size:
        return (
            f"{in_features} inputs on a rank are not a multiple of the group size {group_size}: "
            "choose another number of ranks"
        )
    # Source: CheckOptionalTensorList in ops-transformer's aclnn_grouped_matmul.cpp.
    if is_expert and bits == 8 and 0 < group_size < in_features:
        return (
            f"a scale per {group_size} entries of experts' 8-bit weights is not supported: the "
            "grouped product supports groups for 4-bit weights only, and 8-bit weights per "
            "channel"
        )
    if max(in_features, out_features) > _LARGEST:
        return f"weights of {in_features} x {out_features}: the most on a side is {_LARGEST}"
    packed = out_features if is_expert or 0 < group_size < in_features else in_features
    if bits == 4 and packed % _PACKED:
        return f"4-bit weights of {in_features} x {out_features}: {packed} is not a multiple of 8"
    return None


class WeightOnlyMatmul(NamedTuple):
    """The operands of one product.

    weight:     [in, out] int8, or int32 with eight 4-bit integers each, along the contiguous
                dimension
    scale:      [out], or [groups, out] with a group_size; dtype of the rows
    offset:     shaped like scale, or None for symmetric weights
    group_size: input entries that share a scale; 0: all
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group_size: int

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One launch. bias: [out], fp32 for bf16 rows and fp16 for fp16 rows, or None.

        x: [..., in]. Returns [..., out] of the same dtype.
        """
        result: torch.Tensor = torch_npu.npu_weight_quant_batchmatmul(
            x if x.dim() == 2 else x.reshape(-1, x.shape[-1]),
            self.weight,
            self.scale,
            self.offset,
            bias=bias,
            antiquant_group_size=self.group_size,
        )
        return result if x.dim() == 2 else result.view(*x.shape[:-1], -1)


def arranged(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int, dtype: torch.dtype
) -> WeightOnlyMatmul:
    """Lays a loaded layer's tensors out for the product.

    weight:        [out, in] int8; of W4A16 [out, in / 2], the first of two integers in the low half
    scale, offset: [out, groups], as in a checkpoint
    dtype:         of the model
    """
    groups = scale.shape[1]
    if groups > 1:  # as CANN recommends: [in, out] with groups, [out, in] transposed without
        matrix = _packed(weight, is_turned=True) if bits == 4 else _turned(weight)
        scale, offset = _turned(scale), _turned(offset)
    else:
        matrix = (_packed(weight, is_turned=False) if bits == 4 else weight).t()
        scale, offset = scale.flatten(), offset.flatten()
    in_features = weight.shape[1] * (2 if bits == 4 else 1)
    return WeightOnlyMatmul(
        weight=matrix,
        scale=scale.to(dtype),
        offset=offset.neg().to(dtype) if bool(offset.any()) else None,
        group_size=in_features // groups if groups > 1 else 0,
    )


def arranged_experts(
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    bits: int,
    is_loaded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lays a projection's tensors of all experts out for the grouped product.

    Arguments as in `arranged`, with a leading expert dimension. is_loaded: False if the weights are
    undefined (--load-format dummy), so that the host need not lay them out.
    Returns the weight [experts, in, out] int8 or [experts, in, out / 8] int32, scale and offset
    [experts, out] or [experts, groups, out] in the dtype of `scale`; the grouped product requires
    an offset.
    """
    if bits == 4:
        pack = _packed if is_loaded else _packed_zeros
        matrices = torch.stack([pack(one, is_turned=True) for one in weight])
    else:
        matrices = _turned(weight)
    offset = offset.neg()
    if scale.shape[-1] == 1:
        return matrices, scale.squeeze(-1), offset.squeeze(-1)
    return matrices, _turned(scale), _turned(offset)


def _turned(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.transpose(-1, -2).contiguous()


def _packed(weight: torch.Tensor, is_turned: bool) -> torch.Tensor:
    """int32 [in, out / 8] if `is_turned`, else [out, in / 8], in the operators' order."""
    integers = unpacked_columns(weight.cpu())
    if is_turned:
        integers = integers.t()
    wide = integers.to(torch.int32).contiguous().to(weight.device)
    packed: torch.Tensor = torch_npu.npu_convert_weight_to_int4pack(wide)
    return packed


def _packed_zeros(weight: torch.Tensor, is_turned: bool) -> torch.Tensor:
    """Like `_packed`, for a weight of zeros, whose values are not read."""
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    outer, inner = (columns, rows) if is_turned else (rows, columns)
    return torch.zeros(outer, inner // 8, dtype=torch.int32, device=weight.device)


def unpacked_columns(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks 4-bit integers of two columns per byte, the first in the low half.

    packed: [..., in / 2] int8
    Returns [..., in] int8, from -8 to 7.
    """
    low, high = (packed << 4) >> 4, packed >> 4  # int8 keeps its sign
    return torch.stack((low, high), dim=-1).flatten(-2)


def packed_columns(integers: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpacked_columns`."""
    return (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)


def floats_of(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int
) -> torch.Tensor:
    """Returns a layer's dequantized weight, fp32 [out, in]; arguments as in `arranged`."""
    integers = unpacked_columns(weight) if bits == 4 else weight
    wide = integers.float().unflatten(1, (scale.shape[1], -1))
    values: torch.Tensor = (wide - offset.float().unsqueeze(2)) * scale.float().unsqueeze(2)
    return values.flatten(1)


def require_exact_offset(name: str, offset: torch.Tensor) -> None:
    """Raises UnsupportedFeatureError for offsets that 16-bit floats cannot hold exactly.

    name: of the tensor
    """
    if bool(((offset != offset.round()) | (offset.abs() > _LARGEST_OFFSET)).any()):
        raise UnsupportedFeatureError(
            f"{name} holds offsets that are not 8-bit integers, and the product reads them in 16 "
            f"bits. {WAY_OUT}."
        )


def unpacked_rows(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks 4-bit integers of two rows per byte, the first in the low half.

    packed: [..., out / 2, in] int8
    Returns [..., out, in] int8, from -8 to 7.
    """
    low, high = (packed << 4) >> 4, packed >> 4  # int8 keeps its sign
    return torch.stack((low, high), dim=-2).flatten(-3, -2)
