"""Root-mean-square normalization on torch_npu's fused operators."""

from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.device.core_limits import memory_bound
from vllm_davinci.core.layers.quantized_activation import (
    InputScale,
    Output,
    OutputKind,
    QuantizedActivation,
    Readers,
    TracedActivation,
)


class NPURMSNorm(RMSNorm):
    """One launch, with or without the residual addition, and one for a bias.

    If all readers of a norm after a residual addition quantize it alike, one call of a compiled
    operator does both: `output` is set once, after loading (`quantization.resolve_outputs`).

    A quantized checkpoint whose outliers were moved into the norms has biases for some of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.has_weight:
            ones = self.__dict__.pop("weight")
            self.register_buffer("weight", ones, persistent=False)  # sleep mode preserves buffers
        self.output: Output = OutputKind.FLOAT  # form of the normalized x + residual
        self._has_loaded_bias = False
        vllm_config = get_current_vllm_config_or_none()
        quantization = None if vllm_config is None else vllm_config.quant_config
        # vLLM passes norms no quantization configuration. Only ours has `has_norm_biases`.
        if self.has_weight and getattr(quantization, "has_norm_biases", False):
            self.bias = torch.nn.Parameter(torch.zeros_like(self.weight), requires_grad=False)
            set_weight_attrs(self.bias, {"weight_loader": self._load_bias})

    def _load_bias(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """Loads the bias and records that this norm has one: only the checkpoint knows."""
        default_weight_loader(parameter, loaded)
        self._has_loaded_bias = True

    @property
    def loaded_bias(self) -> torch.Tensor | None:
        """[hidden_size]; None if the checkpoint has no bias for this norm."""
        return self.bias.data if self._has_loaded_bias else None

    @property
    def is_plain(self) -> bool:
        """True if it is exactly one norm with a weight, over the whole last dimension."""
        return self.covers_rows and self.loaded_bias is None

    @property
    def covers_rows(self) -> bool:
        """True if it has a weight and covers the whole last dimension; a bias is allowed."""
        return self.variance_size_override is None and self.has_weight

    def can_return(self, kind: OutputKind | InputScale) -> bool:
        """True if `forward_oot` of x + residual can return that kind of output."""
        if kind is OutputKind.PER_TOKEN:  # the per-token operator supports no bias
            return self.is_plain
        return isinstance(kind, InputScale) and self.covers_rows

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalizes x, or x + residual, over the last dimension.

        x:        [..., hidden_size]
        residual: shape and dtype of x, or None
        Returns the normalized tensor; with a residual also the sum. Accumulates in fp32. The
        normalized tensor is a QuantizedActivation if `output` says so.
        """
        is_plain = self.has_weight or (residual is None and x.dtype == self.weight.dtype)
        if self.variance_size_override is not None or not is_plain:
            return self.forward_native(x, residual)
        if residual is not None:
            with memory_bound():
                if self.output is OutputKind.FLOAT:
                    return self._of_sum(x, residual)
                return self._of_sum_for_readers(x, residual)
        if norm := fused_op(operators.rms_norm):
            normalized = norm(x=x, weight=self.weight, epsilon=self.variance_epsilon)
        else:
            normalized = torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        return self._with_bias(normalized)

    def _of_sum_for_readers(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual in the form of `output`, and the sum."""
        output = self.output
        if isinstance(output, Readers):
            normalized, total = self._of_sum(x, residual)
            return TracedActivation(normalized, output), total
        weight, epsilon = self.weight, self.variance_epsilon
        norm = {"x": x, "residual": residual, "weight": weight, "epsilon": epsilon}
        if x.dim() == 2 and isinstance(output, InputScale):
            if by_scale := fused_op(operators.add_rms_norm_quant):
                integers, total = by_scale(
                    **norm, bias=self.loaded_bias, scale=output.scale, offset=output.offset
                )
                return QuantizedActivation(integers, None, x.dtype), total
        elif x.dim() == 2 and (by_row := fused_op(operators.add_rms_norm_dynamic_quant)):
            integers, scales, total = by_row(**norm)
            return QuantizedActivation(integers, scales, x.dtype), total
        return self._of_sum(x, residual)

    def _of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual in floats, and the sum."""
        if add_norm := fused_op(operators.add_rms_norm):
            normalized, total = add_norm(
                x=x, residual=residual, weight=self.weight, epsilon=self.variance_epsilon
            )
        else:
            normalized, _, total = torch_npu.npu_add_rms_norm(
                x, residual, self.weight, self.variance_epsilon
            )
        return self._with_bias(normalized), total

    def _with_bias(self, normalized: torch.Tensor) -> torch.Tensor:
        bias = self.loaded_bias
        return normalized if bias is None else normalized.add_(bias)
