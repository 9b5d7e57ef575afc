"""W8A16 and W4A16: integer weights with a scale per channel or per group, inputs in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.local_experts import (
    Experts,
    ExpertsOfFloats,
    Product,
    grouped_matmul,
)
from vllm_davinci.core.quantization.experts_method import QuantizedFusedMoEMethodBase, loaded
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase, plain_tensor
from vllm_davinci.core.quantization.rounding import FloatLayer, stored_per_channel
from vllm_davinci.core.quantization.scheme import SCHEMES, Layout, Scheme, WeightSize
from vllm_davinci.core.quantization.tensors import INT8_WEIGHT, Extent, TensorSpec
from vllm_davinci.core.quantization.weight_only import (
    WAY_OUT,
    arranged,
    arranged_experts,
    floats_of,
    packed_columns,
    refusal,
    refusal_of_groups,
    require_exact_offset,
    unpacked_rows,
)

_PER_GROUP = (
    TensorSpec("weight_scale", Extent.GROUPS),
    TensorSpec("weight_offset", Extent.GROUPS),
)


class WeightOnlyLinearMethod(QuantizedLinearMethodBase):
    """Integer weight with a scale per channel or per group, input in 16 bits."""

    scheme: WeightOnly
    _bias: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        offset = plain_tensor(layer, "weight_offset")
        require_exact_offset(f"{self.prefix}.weight_offset", offset)
        self._product = arranged(
            plain_tensor(layer, "weight"),
            plain_tensor(layer, "weight_scale"),
            offset,
            self.scheme.bits,
            self._dtype,
        )
        for name in ("weight_scale", "weight_offset"):
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(self._product.weight, requires_grad=False)
        bias = getattr(layer, "bias", None)
        if bias is not None:
            is_wide = self._dtype == torch.bfloat16
            self._bias = bias.detach().to(torch.float32 if is_wide else self._dtype)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype.

        bias: the layer's, or None if another rank adds it
        """
        return self._product(x, None if bias is None else self._bias)


class WeightOnlyFusedMoEMethod(QuantizedFusedMoEMethodBase):
    """Integer weights, tokens in 16 bits."""

    scheme: WeightOnly

    def _experts(self, layer: NPURoutedExperts, **place: Any) -> Experts:
        return WeightOnlyExperts(
            gate_up=self._projection(layer, "w13"), down=self._projection(layer, "w2"), **place
        )

    def _projection(self, layer: NPURoutedExperts, group: str) -> WeightOnlyProjection:
        offset = loaded(layer, f"{group}_weight_offset")
        require_exact_offset(f"{self._prefix}.{group}_weight_offset", offset)
        weight, scale, offset = arranged_experts(
            loaded(layer, f"{group}_weight"),
            loaded(layer, f"{group}_weight_scale").to(self._dtype),
            offset.to(self._dtype),
            self.scheme.bits,
            self.settings.is_loaded,
        )
        setattr(layer, f"{group}_weight", torch.nn.Parameter(weight, requires_grad=False))
        for part in ("scale", "offset"):
            delattr(layer, f"{group}_weight_{part}")
        return WeightOnlyProjection(weight=weight, scale=scale, offset=offset)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyProjection:
    """One projection of all experts; the product converts its integers to the rows' dtype.

    weight: [num_local, in, out] int8, or [num_local, in, out / 8] int32, see `weight_only`
    scale:  [num_local, out] or [num_local, groups, out], dtype of the rows
    offset: as scale, added to the integers
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    def __call__(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """rows: [num_rows, in]. Returns [num_rows, out]."""
        return grouped_matmul(
            rows,
            self.weight,
            tokens_per_expert,
            antiquant_scale=[self.scale],
            antiquant_offset=[self.offset],
        )


@dataclass(frozen=True, kw_only=True)
class WeightOnlyExperts(ExpertsOfFloats):
    """Gated experts with integer weights and rows of 16-bit floats."""

    gate_up: WeightOnlyProjection
    down: WeightOnlyProjection

    def _products(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> tuple[Product, Product]:
        return (
            lambda rows: self.gate_up(rows, tokens_per_expert),
            lambda rows: self.down(rows, tokens_per_expert),
        )


class WeightOnly(Scheme):
    """Base of the schemes that keep activations in floats.

    bits: bits of one integer of a weight
    """

    bits: ClassVar[int]
    linear_method = WeightOnlyLinearMethod
    experts_method = WeightOnlyFusedMoEMethod
    is_symmetric = False
    has_groups = True

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        is_column = part in ("weight_scale", "weight_offset") and tensor.dim() == 1
        return tensor.unsqueeze(1) if is_column else tensor

    def require_sizes(self, size: WeightSize) -> None:
        prefix, in_features, out_features, group_size, is_expert = size
        if reason := refusal(self.bits, group_size, in_features, out_features, is_expert):
            told = "are" if is_expert else "is"
            raise UnsupportedFeatureError(f"{prefix} {told} {self.name}: {reason}. {WAY_OUT}.")

    def refusal_of_groups(self, group_size: int) -> str | None:
        reason = refusal_of_groups(group_size)
        return None if reason is None else f"{reason}. {WAY_OUT}"

    def floats(self, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        weight, scale, offset = map(tensor, ("weight", "weight_scale", "weight_offset"))
        return floats_of(weight.cpu(), scale.cpu(), offset.cpu(), self.bits).to(weight.device)


@SCHEMES.register
class W8A16(WeightOnly):
    name = "W8A16"
    bits = 8
    parameters = (INT8_WEIGHT, *_PER_GROUP)
    is_written = True

    def rounded(self, layer: FloatLayer) -> dict[str, torch.Tensor]:
        return stored_per_channel(layer.weight)


@SCHEMES.register
class W4A16(WeightOnly):
    name = "W4A16"
    bits = 4
    parameters = (TensorSpec("weight", Extent.PACKED_COLUMNS, (torch.int8,)), *_PER_GROUP)

    def stored(self, layout: Layout) -> tuple[TensorSpec, ...]:
        weight, *others = self.parameters
        if not layout.version:
            return INT8_WEIGHT, *others  # one integer per int8
        if layout.group_size:
            return replace(weight, extent=Extent.PACKED_ROWS), *others
        return self.parameters

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        if part != "weight":
            return super().converted(part, tensor, layout)
        if not layout.version:
            return packed_columns(tensor)
        return packed_columns(unpacked_rows(tensor)) if layout.group_size else tensor
