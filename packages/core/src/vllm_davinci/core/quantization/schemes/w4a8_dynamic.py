"""W4A8_DYNAMIC: integers of 4 bits with a scale per channel; every token is quantized to int8.

Routed experts stay in 4 bits on the device if the grouped product supports them. Its matrix unit
multiplies 4-bit integers: an entry of a token is split into 16 a + b + 8. The products of a and b
are rounded to float16; the contribution of the 8 is added afterwards:

y = (16 (a * weight^T * weight_scale) + b * weight^T * weight_scale + of_eights) * s
of_eights = 8 * sum(weight) * weight_scale

Linear layers (A2 and A3 have no such product with one scale per channel) and experts of unsupported
sizes become W8A8_DYNAMIC layers when loaded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu

from vllm_davinci.core.device.refusals import refusal_of
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.local_experts import Experts, grouped_matmul
from vllm_davinci.core.fused_moe.method import transposed_in_memory
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.experts_method import loaded
from vllm_davinci.core.quantization.scheme import SCHEMES, Layout
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import (
    W8A8Dynamic,
    W8A8DynamicFusedMoEMethod,
)
from vllm_davinci.core.quantization.tensors import (
    PER_CHANNEL,
    Extent,
    TensorSpec,
    bits_from_float,
)
from vllm_davinci.core.quantization.weight_only import unpacked_rows

logger = init_logger(__name__)

_EIGHT = 8  # integers per int32, and the offset of a token's lower half
_WEIGHT = TensorSpec("weight", Extent.PACKED_ROWS, (torch.int8,))


class W4A8DynamicFusedMoEMethod(W8A8DynamicFusedMoEMethod):
    """Weights of 4 bits, every token quantized with its own scale."""

    def _experts(self, layer: NPURoutedExperts, **place: Any) -> Experts:
        gate_up, down = loaded(layer, "w13_weight_scale"), loaded(layer, "w2_weight_scale")
        inner, hidden = gate_up.shape[1] // 2, down.shape[1]
        if product_takes_halves(hidden, 2 * inner, self._dtype) and product_takes_halves(
            inner, hidden, self._dtype
        ):
            return HalvedExperts(
                gate_up=self._projection(layer, "w13"),
                down=self._projection(layer, "w2"),
                dtype=self._dtype,
                **place,
            )
        logger.warning_once(
            "Experts of %d x %d have a size that the product of 8-bit rows and 4-bit weights does"
            " not support: their weights are stored in 8 bits, of twice the size.",
            hidden,
            inner,
        )
        for name in ("w13_weight", "w2_weight"):
            weight = loaded(layer, name)
            whole = unpacked_rows(weight.cpu()).to(weight.device)
            setattr(layer, name, torch.nn.Parameter(whole, requires_grad=False))
        return super()._experts(layer, **place)

    def _projection(self, layer: NPURoutedExperts, group: str) -> HalvedProjection:
        scale = loaded(layer, f"{group}_weight_scale").squeeze(-1)
        packed = loaded(layer, f"{group}_weight")
        of_eights = torch.zeros_like(scale)
        if self.settings.is_loaded:  # otherwise the weights are undefined
            of_eights = _EIGHT * sums_of_rows(packed) * scale
        return HalvedProjection(
            # A byte holds integers of two rows, which are two columns of the transposed weight.
            weight=transposed_in_memory(layer.get_parameter(f"{group}_weight")).view(torch.int32),
            scale=bits_from_float(scale.cpu()).unsqueeze(1).to(scale.device),
            of_eights=of_eights,
        )


@dataclass(frozen=True, kw_only=True)
class HalvedProjection:
    """One projection of all experts.

    weight:    [num_local, in, out / 8] int32, eight integers in each
    scale:     [num_local, 1, out] int64, the bits of fp32
    of_eights: [num_local, out] fp32, 8 times the sums of the weight over its inputs, scaled
    """

    weight: torch.Tensor
    scale: torch.Tensor
    of_eights: torch.Tensor

    def __call__(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """rows: [num_rows, in] int8, which the product may overwrite; scales: [num_rows] fp32.

        Returns [num_rows, out] of `dtype`.
        """
        return grouped_matmul(
            rows,
            self.weight,
            tokens_per_expert,
            dtype,
            scale=[self.scale],
            bias=[self.of_eights],
            per_token_scale=[scales],
        )


@dataclass(frozen=True, kw_only=True)
class HalvedExperts(Experts):
    """Gated experts with 4-bit weights; every row is quantized with its own scale.

    dtype: of the result, and between the products
    """

    takes_integers: ClassVar[bool] = True

    gate_up: HalvedProjection
    down: HalvedProjection
    dtype: torch.dtype

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Four launches, and one for rows that are not quantized yet."""
        if scales is None:
            rows, scales = torch_npu.npu_dynamic_quant(rows)
        gate_up = self.gate_up(rows, scales, tokens_per_expert, self.dtype)
        activated, scales = torch_npu.npu_dynamic_quant(self.activation(gate_up))
        return self.down(activated, scales, tokens_per_expert, self.dtype)


def sums_of_rows(packed: torch.Tensor) -> torch.Tensor:
    """Sums 4-bit integers over the inputs, on the weights' device.

    packed: [num_local, out / 2, in] int8, see `unpacked_rows`
    Returns [num_local, out] int32.
    """
    sums = torch.empty((*packed.shape[:2], 2), dtype=torch.int32, device=packed.device)
    # One expert at a time, because copies are as large as the weights.
    for weight, of_expert in zip(packed, sums, strict=True):
        # A byte is 16 times its upper half plus its unsigned lower half.
        unsigned, signs, whole = (
            bits.sum(-1, dtype=torch.int32) for bits in (weight & 15, weight & 8, weight)
        )
        of_expert[:, 0] = unsigned - 2 * signs
        of_expert[:, 1] = (whole - unsigned) // 16
    return sums.flatten(1)


@functools.cache
def product_takes_halves(in_features: int, out_features: int, dtype: torch.dtype) -> bool:
    """True if the grouped product supports 8-bit rows and 4-bit weights of that size."""
    if out_features % _EIGHT:
        return False

    def multiply() -> None:
        # A model is built under its own default dtype.
        new = functools.partial(torch.zeros, device="npu", dtype=torch.float32)
        HalvedProjection(
            weight=new(1, in_features, out_features // _EIGHT, dtype=torch.int32),
            scale=new(1, 1, out_features, dtype=torch.int64),
            of_eights=new(1, out_features),
        )(new(1, in_features, dtype=torch.int8), new(1), new(1, dtype=torch.int64), dtype)

    return refusal_of(multiply) is None


@SCHEMES.register
class W4A8Dynamic(W8A8Dynamic):
    name = "W4A8_DYNAMIC"
    computed_as = W8A8Dynamic.name
    keeps_experts = True
    parameters = (_WEIGHT, *PER_CHANNEL)
    experts_method = W4A8DynamicFusedMoEMethod
    is_written = False

    def stored(self, layout: Layout) -> tuple[TensorSpec, ...]:
        # The files' own sums times 8 are not used: they cover whole experts, and a rank needs its
        # part's.
        return *self.parameters, TensorSpec("scale_bias", Extent.PER_PART, (torch.float32,))

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        own = self.converted_of_expert(part, tensor, layout)
        return own if own is None or part != "weight" else unpacked_rows(own)

    def converted_of_expert(
        self, part: str, tensor: torch.Tensor, layout: Layout
    ) -> torch.Tensor | None:
        return None if part == "scale_bias" else tensor
