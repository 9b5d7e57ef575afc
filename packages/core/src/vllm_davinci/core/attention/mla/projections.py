"""The projections before MLA as one fused operator takes them, found once after loading."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.mla import MLAModules

from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.layers.linear import plain_weight
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase
from vllm_davinci.core.quantization.quant_matmul import QuantMatmul


class FloatProjections(NamedTuple):
    """Weights as a product takes them, [in_features, out_features].

    down:      W_DQ and W_DKV, or W_DKV alone when queries are not compressed
    norm:      weight of the compressed queries' norm, or None
    up:        W_UQ
    q_epsilon: of that norm
    """

    down: torch.Tensor
    norm: torch.Tensor | None
    up: torch.Tensor
    q_epsilon: float

    @property
    def fused_op(self) -> Callable[..., Any] | None:
        return fused_op("mla_preprocess")

    def arguments(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The first arguments of the operator."""
        return hidden_states, self.down, self.norm, self.up


class QuantizedProjections(NamedTuple):
    """As FloatProjections, of int8. All rows have scales of their own, or none has.

    norm_bias: of the compressed queries' norm, or None
    """

    down: QuantMatmul
    norm: torch.Tensor | None
    norm_bias: torch.Tensor | None
    up: QuantMatmul
    q_epsilon: float

    @property
    def fused_op(self) -> Callable[..., Any] | None:
        return fused_op("mla_preprocess_w8a8")

    def arguments(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The first arguments of the operator. Quantizes the rows where the norm before has not."""
        down, up = self.down, self.up
        scale = None if self.norm is None else up.input_scale
        return (
            *down.quantize(hidden_states),
            down.weight,
            down.scale,
            down.bias,
            self.norm,
            self.norm_bias,
            None if scale is None else scale.scale,
            None if scale is None else scale.offset,
            up.weight,
            up.scale,
            up.bias,
        )


Projections = FloatProjections | QuantizedProjections


def fusible_projections(modules: MLAModules) -> Projections | None:
    """The projections of a layer whose weights are loaded; None when no fused operator takes them.

    That is when a projection is more than a product, when they are of several kinds, and when a
    norm is not one of whole rows.
    """
    if not _covers_rows(modules.kv_a_layernorm):  # whose bias attention adds to values
        return None
    if modules.fused_qkv_a_proj is None:
        norm, layers = None, (modules.kv_a_proj_with_mqa, modules.q_proj)
    else:
        norm, layers = modules.q_a_layernorm, (modules.fused_qkv_a_proj, modules.q_b_proj)
        if not _covers_rows(norm):
            return None
    return _float_projections(norm, *layers) or _quantized_projections(norm, *layers)


def _float_projections(norm: Any, down: Any, up: Any) -> FloatProjections | None:
    if norm is not None and not norm.is_plain:
        return None
    weights = plain_weight(down), plain_weight(up)
    if weights[0] is None or weights[1] is None:
        return None
    weight, epsilon = _of_norm(norm)
    return FloatProjections(weights[0], weight, weights[1], epsilon)


def _quantized_projections(norm: Any, down: Any, up: Any) -> QuantizedProjections | None:
    first, second = _quant_matmul(down), _quant_matmul(up)
    if first is None or second is None:
        return None
    if norm is None:  # both multiply the same rows
        is_uniform, bias = first.quantizes_as(second), None
    else:
        is_uniform = (first.input_scale is None) == (second.input_scale is None)
        bias = norm.loaded_bias
    weight, epsilon = _of_norm(norm)
    return QuantizedProjections(first, weight, bias, second, epsilon) if is_uniform else None


def _of_norm(norm: Any) -> tuple[torch.Tensor | None, float]:
    return (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)


def _quant_matmul(layer: Any) -> QuantMatmul | None:
    method = getattr(layer, "quant_method", None)
    return method.quant_matmul if isinstance(method, QuantizedLinearMethodBase) else None


def _covers_rows(norm: Any) -> bool:
    return isinstance(norm, NPURMSNorm) and norm.covers_rows
