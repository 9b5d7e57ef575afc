"""The projections before MLA in the form of a fused operator, found once after loading."""

from typing import Any, NamedTuple, TypedDict

import torch
from vllm.model_executor.layers.mla import MLAModules

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.layers.linear import plain_weight
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase
from vllm_davinci.core.quantization.quant_matmul import QuantMatmul

# ql_nope, q_pe, q, kv_c_normed and k_pe of the operators; see vllm_davinci.operators.
Outputs = tuple[
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]


class PreprocessArguments(TypedDict):
    """Arguments of the operators that do not depend on the storage format of weights."""

    kv_a_norm: torch.Tensor
    W_UK: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    kv_c_cache: torch.Tensor
    k_pe_cache: torch.Tensor
    kv_epsilon: float
    num_decode_tokens: int
    side_stream: torch.Stream | None


class FloatProjections(NamedTuple):
    """Float weights, [in_features, out_features].

    down:      W_DQ and W_DKV, or W_DKV alone when queries are not compressed
    norm:      weight of the compressed queries' norm, or None
    up:        W_UQ
    q_epsilon: epsilon of that norm
    """

    down: torch.Tensor
    norm: torch.Tensor | None
    up: torch.Tensor
    q_epsilon: float

    @property
    def is_fused(self) -> bool:
        """True if an installed package provides the stage."""
        return fused_op(operators.mla_preprocess) is not None

    def preprocess(self, hidden_states: torch.Tensor, rest: PreprocessArguments) -> Outputs:
        """Runs the stage in one call; requires `is_fused`."""
        stage = fused_op(operators.mla_preprocess)
        assert stage is not None
        return stage(
            hidden_states=hidden_states,
            a_weight=self.down,
            q_a_norm=self.norm,
            q_b_weight=self.up,
            q_epsilon=self.q_epsilon,
            **rest,
        )


class QuantizedProjections(NamedTuple):
    """Like FloatProjections, in int8. Either all rows have their own scales or none.

    norm_bias: bias of the compressed queries' norm, or None
    """

    down: QuantMatmul
    norm: torch.Tensor | None
    norm_bias: torch.Tensor | None
    up: QuantMatmul
    q_epsilon: float

    @property
    def is_fused(self) -> bool:
        return fused_op(operators.mla_preprocess_w8a8) is not None

    def preprocess(self, hidden_states: torch.Tensor, rest: PreprocessArguments) -> Outputs:
        """Like FloatProjections.preprocess. Quantizes rows unless the norm before did."""
        stage = fused_op(operators.mla_preprocess_w8a8)
        assert stage is not None
        down, up = self.down, self.up
        scale = None if self.norm is None else up.input_scale
        integers, row_scales = down.quantize(hidden_states)
        return stage(
            hidden_states=integers,
            hidden_scale=row_scales,
            a_weight=down.weight,
            a_scale=down.scale,
            a_bias=down.bias,
            q_a_norm=self.norm,
            q_a_norm_bias=self.norm_bias,
            q_input_scale=None if scale is None else scale.scale,
            q_input_offset=None if scale is None else scale.offset,
            q_b_weight=up.weight,
            q_b_scale=up.scale,
            q_b_bias=up.bias,
            q_epsilon=self.q_epsilon,
            **rest,
        )


Projections = FloatProjections | QuantizedProjections


def fusible_projections(modules: MLAModules) -> Projections | None:
    """The projections of a loaded layer; None if no fused operator supports them.

    Unsupported: projections that are more than a product or differ in kind, and norms that do not
    cover whole rows.
    """
    if not _covers_rows(modules.kv_a_layernorm):  # attention adds its bias to the values
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
