"""What quantized layers are handed in place of rounded activations, by norms and by each other.

All are tensors of the float dtype to whoever does not know them: any operator on one sees the
values that it stands for. The next quantized layer takes the integers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch_npu
from torch.utils._pytree import tree_leaves, tree_map

from vllm_davinci.core.errors import UnsupportedFeatureError

# Brings rows that stand elsewhere here: [rows there, ...] -> [rows here, ...]
Move = Callable[[torch.Tensor], torch.Tensor]

# Operators that vLLM declares to write to what they only read.
_READ_ONLY = {"vllm::moe_forward"}


class _StandIn(torch.Tensor):
    """A tensor whose values are computed when an operator asks for them."""

    integers: torch.Tensor  # what is there already

    def to_float(self) -> torch.Tensor:
        raise NotImplementedError

    def tensors(self) -> Iterable[torch.Tensor]:
        """What is there already, and what the values would be computed from."""
        raise NotImplementedError

    def record_stream(self, stream: Any) -> None:
        for tensor in self.tensors():
            tensor.record_stream(stream)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        schema: torch.FunctionSchema = func._schema  # type: ignore[attr-defined]
        if schema.is_mutable:
            _check_writes(schema, args, kwargs or {})

        def computed(value: Any) -> Any:
            return value.to_float() if isinstance(value, _StandIn) else value

        return func(*tree_map(computed, args), **tree_map(computed, kwargs or {}))


def _check_writes(schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: Any) -> None:
    """Raises UnsupportedFeatureError for an operator that would write to computed values."""
    if schema.name in _READ_ONLY:
        return
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and any(isinstance(leaf, _StandIn) for leaf in tree_leaves(value)):
            raise UnsupportedFeatureError(
                f"{schema.name} would write to an activation that is kept as integers "
                f"(argument {argument.name!r}), and the values would be lost. Let the model "
                "compute it out of place, or serve its float checkpoint."
            )


Activation = TypeVar("Activation", bound="QuantizedActivation")


class QuantizedActivation(_StandIn):
    """int8 rows with a scale each: value = integer * scale.

    integers: [num_tokens, features] int8
    scales:   [num_tokens] fp32
    """

    scales: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Activation], integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> Activation:
        made: Activation = torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=dtype, device=integers.device
        )
        made.integers = integers
        made.scales = scales
        return made

    def to_float(self) -> torch.Tensor:
        return (self.integers.to(torch.float32) * self.scales.unsqueeze(-1)).to(self.dtype)

    def tensors(self) -> Iterable[torch.Tensor]:
        return (self.integers, self.scales)


class InputScale(NamedTuple):
    """How a layer with a scale of the checkpoint quantizes: round(x / scale + offset).

    scale:  [1] fp32, on the device
    offset: [1] int32, on the device
    values: both, on the host
    """

    scale: torch.Tensor
    offset: torch.Tensor
    values: tuple[float, int]

    @classmethod
    def of(cls, scale: torch.Tensor, offset: torch.Tensor) -> InputScale:
        return cls(scale, offset, (float(scale), int(offset)))

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., features]. Returns int8 [num_tokens, features]. One launch."""
        if isinstance(x, QuantizedNorm | StaticNorm):
            return x.rows.quantized(self)
        integers: torch.Tensor = torch_npu.npu_quantize(
            x.reshape(-1, x.shape[-1]), self.scale, self.offset, torch.qint8, -1, True
        )
        return integers


class NormRows(Protocol):
    """One call of a norm that may have quantized its rows already."""

    def values(self) -> torch.Tensor:
        """The norm before quantization. Whoever asks wants no integers, from now on."""

    def quantized(self, wanted: InputScale) -> torch.Tensor:
        """The norm as int8, for a layer that quantizes so. The next call does it in its launch."""

    def moved(self, move: Move) -> NormRows:
        """The same of the rows that `move` brings here, now or when it is asked for."""

    def stored(self) -> torch.Tensor:
        """[num_tokens, features], the integers or the values."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """See _StandIn.tensors."""


class QuantizedNorm(QuantizedActivation):
    """A norm's rows, quantized in its own launch for the layer that multiplies them."""

    rows: NormRows

    @classmethod
    def of(
        cls, integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, rows: NormRows
    ) -> QuantizedNorm:
        made = cls(integers, scales, dtype)
        made.rows = rows
        return made

    def to_float(self) -> torch.Tensor:
        return self.rows.values()

    def moved(self, move: Move) -> QuantizedNorm:
        """The rows that `move` brings here, and their scales, still as integers."""
        integers, scales = move(self.integers), move(self.scales)
        return QuantizedNorm.of(integers, scales, self.dtype, self.rows.moved(move))

    def tensors(self) -> Iterable[torch.Tensor]:
        return (*super().tensors(), *self.rows.tensors())


class StaticNorm(_StandIn):
    """A norm's rows for layers with an InputScale, whether or not they are quantized yet."""

    rows: NormRows

    @staticmethod
    def __new__(cls: type[StaticNorm], dtype: torch.dtype, rows: NormRows) -> StaticNorm:
        stored = rows.stored()
        made: StaticNorm = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=dtype, device=stored.device
        )
        made.rows = rows
        return made

    def to_float(self) -> torch.Tensor:
        return self.rows.values()

    def moved(self, move: Move) -> StaticNorm:
        """The rows that `move` brings here: as integers, where they are quantized already."""
        return StaticNorm(self.dtype, self.rows.moved(move))

    def tensors(self) -> Iterable[torch.Tensor]:
        return self.rows.tensors()


class IntegerProjection(_StandIn):
    """The int32 sums of a product of int8 matrices, not scaled yet.

    integers:     [num_tokens, features] int32, the sums
    row_scales:   [num_tokens] fp32, of the input
    weight_scale: [features] fp32
    on_use:       called when the values are asked for, which the fused operator does not
    """

    row_scales: torch.Tensor
    weight_scale: torch.Tensor
    on_use: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        sums: torch.Tensor,
        row_scales: torch.Tensor,
        weight_scale: torch.Tensor,
        dtype: torch.dtype,
        on_use: Callable[[], None],
    ) -> IntegerProjection:
        made: IntegerProjection = torch.Tensor._make_wrapper_subclass(
            cls, sums.shape, dtype=dtype, device=sums.device
        )
        made.integers = sums
        made.row_scales = row_scales
        made.weight_scale = weight_scale
        made.on_use = on_use
        return made

    def to_float(self) -> torch.Tensor:
        self.on_use()
        values: torch.Tensor = torch_npu.npu_dequant_bias(
            self.integers, self.weight_scale, self.row_scales, None, output_dtype=self.dtype
        )
        return values

    def tensors(self) -> Iterable[torch.Tensor]:
        return (self.integers, self.row_scales, self.weight_scale)

    def swiglu(self) -> QuantizedActivation:
        """silu(first half) * second half, quantized per token: one launch, no rounding between."""
        integers, scales = torch_npu.npu_dequant_swiglu_quant(
            self.integers,
            weight_scale=self.weight_scale,
            activation_scale=self.row_scales,
            activate_left=True,
            quant_mode=1,
        )
        return QuantizedActivation(integers, scales, self.dtype)
