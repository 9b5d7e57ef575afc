"""Converts fp8 and MXFP4 weights, which these NPUs do not multiply, to floats or W8A8_DYNAMIC.

MXFP4: two numbers of 4 bits (1 of sign, 2 of exponent, 1 of mantissa) in a byte, the first in its
low half, and a power of two for each 32 of a row (OCP Microscaling Formats, 1.0).
"""

import re
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.rounding import FloatLayer
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.quantization.tensors import dtype_name

DTYPE = torch.float8_e4m3fn
INTEGERS = "W8A8_DYNAMIC"  # scheme of fp8 weights converted to integers
# Suffixes of scale names, after the weight's name.
SCALES = ("_scale_inv", "_scale")
_RELEASED_SCALE = ".scale"  # DeepSeek-V4's files name the scales of `X.weight` `X.scale`
# Rows of a table of n-grams, in parts with one scale: `X.shard_N.weight`, `X.weight_scale`.
_ROWS = re.compile(r"^(?P<table>.+)\.shard_\d{1,9}\.weight$")
PACKED = (torch.int8, torch.uint8)  # dtypes of packed MXFP4 weights, [out, in / 2]
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16)
INPUT_SCALE = "input_scale"  # input scale of an fp8 product, which is not computed here
_NAN = 0x7F  # NaN without its sign bit
_SIGN_AND_NUMBER = 0x87F0 - 0x10000  # mask of sign and number in the 16 bits of bf16
_ROWS_AT_ONCE = 128  # rows of a weight with a scale per row


def has_scales(name: str, dtype: torch.dtype) -> bool:
    """True for fp8 and MXFP4 weights, which need their scales."""
    return dtype == DTYPE or (dtype in PACKED and name.endswith(".weight"))


class Block(NamedTuple):
    """The size of the blocks that share one scale."""

    rows: int
    columns: int

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Shape of the scales of a weight [out, in]."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


# Packed MXFP4 has one scale per 32 numbers of a row, in 16 bytes.
_PACKED_BLOCK = Block(1, 16)


def block_of_scale(
    shape: Sequence[int], scale_shape: Sequence[int], blocks: Block | None
) -> Block | None:
    """Blocks of a weight [out, in] with scales of that shape, or None if they do not fit.

    blocks: from config.json; None: a scale for the tensor, or for each row
    """
    count = 1
    for size in scale_shape:
        count *= size
    if blocks is not None and tuple(scale_shape) == blocks.scale_shape(shape):
        return blocks
    if count == 1:
        return Block(max(shape[0], 1), max(shape[1], 1))
    is_per_row = tuple(scale_shape) in ((shape[0],), (shape[0], 1))
    return Block(1, max(shape[1], 1)) if is_per_row else None


def weight_of(name: str) -> str | None:
    """The name of the weight whose scales have that name; None if it is no weight's scales."""
    for ending in SCALES:
        weight = name.removesuffix(ending)
        if weight != name and weight.endswith(("weight", "_proj")):
            return weight
    prefix = name.removesuffix(_RELEASED_SCALE)
    return f"{prefix}.weight" if prefix != name else None


def table_of(name: str) -> str | None:
    """`X.weight` for the rows `X.shard_N.weight` of a table; None for other tensors."""
    found = _ROWS.match(name)
    return f"{found['table']}.weight" if found else None


def is_scale(name: str) -> bool:
    """True if a tensor of that name holds scales of an fp8 weight or of its input."""
    return name.endswith(INPUT_SCALE) or weight_of(name) is not None


def scale_of(name: str, names: Container[str]) -> str | None:
    """The name of a weight's scales among `names`, or None."""
    known = [f"{table_of(name) or name}{ending}" for ending in SCALES]
    known += [f"{name.removesuffix('.weight')}{_RELEASED_SCALE}"]
    return next((each for each in known if each in names), None)


def missing_scale(name: str) -> str:
    """The name of the scales that a weight lacks, for messages."""
    table = table_of(name)
    return f"{table}{SCALES[1]}" if table else f"{name}{SCALES[0]}"


def blocks_of(dtype: torch.dtype, blocks: Block | None) -> Block | None:
    """Returns the scale blocks of a weight stored in `dtype`. blocks: of fp8, from config.json"""
    return _PACKED_BLOCK if dtype in PACKED else blocks


def fits(shape: tuple[int, ...], scale: tuple[int, ...], blocks: Block | None) -> bool:
    """True if scales of shape `scale` belong to a weight of `shape`; also for several experts."""
    if len(shape) == 3:
        has_all = bool(scale) and scale[0] == shape[0]
        return has_all and block_of_scale(shape[1:], scale[1:], blocks) is not None
    return len(shape) == 2 and block_of_scale(shape, scale, blocks) is not None


def expected(shape: tuple[int, ...], blocks: Block | None) -> str:
    """The scales that a weight of that shape needs, for messages."""
    if len(shape) not in (2, 3):
        return "no shape: the weight is neither a matrix nor one of several experts"
    told = f"one entry, or shape {[*shape[:-2], shape[-2], 1]}"
    if blocks is None:
        return told
    return f"shape {[*shape[:-2], *blocks.scale_shape(shape[-2:])]}"


def require_scale(
    name: str,
    weight: torch.Tensor,
    scale_name: str,
    scale: torch.Tensor | None,
    blocks: Block | None,
) -> None:
    """Raises CheckpointError for an fp8 weight whose scales are missing or have a wrong shape."""
    if scale is None:
        raise CheckpointError(
            f"{name} holds {'MXFP4' if weight.dtype in PACKED else 'fp8'}, and {scale_name} is in "
            "no file: without its scales the weight has no values. Copy the rest of the checkpoint."
        )
    shape, blocks = tuple(weight.shape), blocks_of(weight.dtype, blocks)
    if not scale.dtype.is_floating_point or not fits(shape, tuple(scale.shape), blocks):
        raise CheckpointError(
            f"{scale_name} has shape {list(scale.shape)} and dtype {dtype_name(scale.dtype)}, and "
            f"the weight {list(shape)} needs {expected(shape, blocks)} and a floating dtype. Copy "
            "the file again."
        )


def dequantized(
    weight: torch.Tensor, scale: torch.Tensor, block: Block
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields fp32 [rows, in] for a few blocks at a time, to save memory.

    weight: [out, in] fp8; scale: [out blocks, in blocks]
    """
    columns = weight.shape[1]
    step = 1 if block.rows > 1 else _ROWS_AT_ONCE
    for first in range(0, scale.shape[0], step):
        rows = slice(first * block.rows, (first + step) * block.rows)
        wide = scale[first : first + step].float().repeat_interleave(block.columns, 1)
        yield rows, _exact(weight[rows]).float().mul_(wide[:, :columns])


def as_floats(
    weight: torch.Tensor,
    scale: torch.Tensor,
    blocks: Block | None,
    dtype: torch.dtype,
    spares: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The weight in the model's dtype, each value rounded once.

    weight: [out, in], or [experts, out, in], with a leading expert dimension in scale as well
    scale:  any floating dtype; see `block_of_scale`
    spares: tensors whose memory the result may reuse, if no other tensor shares it
    """
    if weight.dim() == 3:
        return torch.stack(
            [as_floats(*one, blocks, dtype) for one in zip(weight, scale, strict=True)]
        )
    if weight.dtype in PACKED:
        return unpacked(weight, scale).to(dtype)
    block = block_of_scale(weight.shape, scale.shape, blocks)
    assert block is not None, "require_scale"
    scale = scale.float().reshape(block.scale_shape(weight.shape)).contiguous()
    if dtype in (torch.bfloat16, torch.float32) and (
        convert := fused_op(operators.block_fp8_floats)
    ):
        return convert(
            weight=weight,
            scale=scale,
            block_rows=block.rows,
            block_columns=block.columns,
            dtype=dtype,
            spares=spares,
        )
    result = torch.empty(weight.shape, dtype=dtype)
    for part, values in dequantized(weight, scale, block):
        result[part] = values
    return result


def as_integers(
    weight: torch.Tensor,
    scale: torch.Tensor,
    blocks: Block | None,
    spares: Sequence[torch.Tensor] = (),
) -> dict[str, torch.Tensor]:
    """The tensors of W8A8_DYNAMIC, rounded from the dequantized fp8 weight.

    Arguments as for `as_floats`, for a matrix.
    """
    if weight.dtype in PACKED:
        floats = FloatLayer(unpacked(weight, scale).float(), torch.float32)
        return find_scheme(INTEGERS, "MXFP4").rounded(floats)
    block = block_of_scale(weight.shape, scale.shape, blocks)
    assert block is not None, "require_scale"
    scale = scale.float().reshape(block.scale_shape(weight.shape)).contiguous()
    if convert := fused_op(operators.block_fp8_integers):
        integers, weight_scale = convert(
            weight=weight,
            scale=scale,
            block_rows=block.rows,
            block_columns=block.columns,
            spares=spares,
        )
    else:
        scheme = find_scheme(INTEGERS, "fp8")
        integers = torch.empty(weight.shape, dtype=torch.int8)
        weight_scale = torch.empty(weight.shape[0], 1)
        for rows, values in dequantized(weight, scale, block):
            made = scheme.rounded(FloatLayer(values, torch.float32))
            integers[rows], weight_scale[rows] = made["weight"], made["weight_scale"]
    return {
        "weight": integers,
        "weight_scale": weight_scale,
        "weight_offset": torch.zeros_like(weight_scale),
    }


def unpacked(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """An MXFP4 weight [out, in / 2] with scales [out, in / 32]: [out, in] bf16, exactly."""
    signed = torch.cat([_FP4, -_FP4])
    of_byte = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=1)
    pairs = of_byte.view(torch.int32).flatten()  # both numbers of each byte
    found = pairs.index_select(0, weight.view(torch.uint8).flatten().int()).view(torch.bfloat16)
    values = found.view(*scale.shape, -1)
    return values.mul_(scale.to(torch.bfloat16).unsqueeze(-1)).view(len(weight), -1)


def _exact(weight: torch.Tensor) -> torch.Tensor:
    """Converts fp8 to bf16, which holds all of its values.

    Works on the bits, in a tenth of the time of torch's conversion: sign and the seven bits of
    exponent and mantissa become those of a bf16 number, whose exponent bias is 127 instead of 7.
    """
    stored = weight.view(torch.int8)
    if bool(((stored == _NAN) | (stored == _NAN - 128)).any()):
        return weight.to(torch.bfloat16)
    wide = stored.to(torch.int16)
    wide.bitwise_left_shift_(4).bitwise_and_(_SIGN_AND_NUMBER)
    return wide.view(torch.bfloat16).mul_(2.0**120)
