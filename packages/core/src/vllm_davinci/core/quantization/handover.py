"""What quantized layers are handed in place of rounded activations, by norms and by each other.

All are tensors of the float dtype to whoever does not know them: any operator on one sees the
values that it stands for. The next quantized layer takes the integers instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch_npu
from torch.utils._pytree import tree_leaves, tree_map

from vllm_davinci.core.errors import UnsupportedFeatureError

# Operators that vLLM declares to write to what they only read.
_READ_ONLY = {"vllm::moe_forward"}


class _StandIn(torch.Tensor):
    """A tensor whose values are computed when an operator asks for them."""

    integers: torch.Tensor  # what is there already

    def to_float(self) -> torch.Tensor:
        raise NotImplementedError

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


class QuantizedNorm(QuantizedActivation):
    """A norm's rows, quantized in its own launch for the layer that multiplies them.

    compute: the norm itself; called when another operator asks for the values, which are those
             before quantization
    """

    compute: Callable[[], torch.Tensor]

    @classmethod
    def of(
        cls,
        integers: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        compute: Callable[[], torch.Tensor],
    ) -> QuantizedNorm:
        made = cls(integers, scales, dtype)
        made.compute = compute
        return made

    def to_float(self) -> torch.Tensor:
        return self.compute()


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
