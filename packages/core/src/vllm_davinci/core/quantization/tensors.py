"""Describes a layer's tensors for schemes: names, dtypes, shapes, conversions."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class Extent(Enum):
    """The shape of a layer's tensor, before it is divided over ranks."""

    MATRIX = "[out, in]"
    PACKED_ROWS = "[out / 2, in]"  # two rows of 4-bit integers per int8
    PACKED_COLUMNS = "[out, in / 2]"  # two columns per int8
    CHANNELS = "[out]"
    CHANNEL_COLUMN = "[out, 1]"
    GROUPS = "[out, groups of in]"
    ONE = "[1]"
    PER_PART = "[out, 1 or 16]"  # one column per part of the input that a rank may hold

    def shape(self, out_features: int, in_features: int, group_size: int = 0) -> tuple[int, ...]:
        """The tensor's shape. group_size: input entries that share a scale; 0: all"""
        return {
            Extent.MATRIX: (out_features, in_features),
            Extent.PACKED_ROWS: (out_features // 2, in_features),
            Extent.PACKED_COLUMNS: (out_features, in_features // 2),
            Extent.CHANNELS: (out_features,),
            Extent.CHANNEL_COLUMN: (out_features, 1),
            Extent.GROUPS: (out_features, in_features // group_size if group_size else 1),
            Extent.ONE: (1,),
            Extent.PER_PART: (out_features, 1),
        }[self]

    def shapes(
        self, out_features: int, in_features: int, group_size: int = 0
    ) -> tuple[tuple[int, ...], ...]:
        """All shapes that a checkpoint may have."""
        one = self.shape(out_features, in_features, group_size)
        if self is Extent.PER_PART:
            return one, (out_features, 16)
        # Exporters before format 1.0.0 write the second.
        if self is Extent.GROUPS and not group_size:
            return one, (out_features,)
        return (one,)

    def matrix(self, stored: tuple[int, int]) -> tuple[int, int]:
        """Returns [out, in] of a weight with that stored shape."""
        rows, columns = stored
        if self is Extent.PACKED_ROWS:
            return 2 * rows, columns
        return (rows, 2 * columns) if self is Extent.PACKED_COLUMNS else (rows, columns)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer.

    dtypes:      allowed in a checkpoint; empty for any floating dtype
    is_optional: whether some exporters omit it
    loaded_as:   dtype on the device; None for the first of `dtypes`, or else fp32
    has_bits:    whether it holds fp32 values that may be stored as their bits in int64, as the
                 product of an FP16 model requires
    """

    name: str
    extent: Extent
    dtypes: tuple[torch.dtype, ...] = ()
    is_optional: bool = False
    loaded_as: torch.dtype | None = None
    has_bits: bool = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes if self.dtypes else dtype.is_floating_point

    def accepted(self) -> str:
        """The dtypes that `accepts` allows, for messages."""
        return " or ".join(map(dtype_name, self.dtypes)) or "a floating dtype"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


INT8_WEIGHT = TensorSpec("weight", Extent.MATRIX, (torch.int8,))
PER_CHANNEL = (
    TensorSpec("weight_scale", Extent.CHANNEL_COLUMN),
    TensorSpec("weight_offset", Extent.CHANNEL_COLUMN),
)


def float_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """fp32 values whose bit patterns are in the low halves of `bits`, int64."""
    low = bits & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def deq_scale_as_float(deq_scale: torch.Tensor) -> torch.Tensor:
    """fp32 values of a `deq_scale` in either of its forms."""
    return deq_scale if deq_scale.dtype.is_floating_point else float_from_bits(deq_scale)


def bits_from_float(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of fp32 values as int64, in which FP16 models store `deq_scale`."""
    return values.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def device_dtype(spec: TensorSpec, params_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor on the device, in a model of `params_dtype`."""
    if spec.has_bits:
        return torch.int64 if params_dtype == torch.float16 else torch.float32
    return spec.loaded_as or (spec.dtypes[0] if spec.dtypes else torch.float32)


def conversion(
    spec: TensorSpec, params_dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Function from a checkpoint's tensor to the parameter's content; None if a cast is enough."""
    if not spec.has_bits:
        return None
    as_bits = params_dtype == torch.float16

    def convert(loaded: torch.Tensor) -> torch.Tensor:
        is_bits = not loaded.dtype.is_floating_point
        if is_bits == as_bits:
            return loaded
        converted = bits_from_float(loaded) if as_bits else float_from_bits(loaded)
        if shard_id := getattr(loaded, "shard_id", None):
            converted.shard_id = shard_id  # type: ignore[attr-defined]
        return converted

    return convert
