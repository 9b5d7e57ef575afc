"""Root-mean-square normalization on torch_npu's fused operators."""

from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci.core.ops.compiled import compiled
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.handover import QuantizedNorm


class NPURMSNorm(RMSNorm):
    """One launch, with or without the residual addition, and one for a bias.

    Before a layer that quantizes its input token by token, the compiled operator does both in one
    call.

    A quantized checkpoint whose outliers were moved into the norms has biases for some of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config_or_none()
        quantization = None if vllm_config is None else vllm_config.quant_config
        self._loaded_bias: torch.Tensor | None = None
        self._hands_integers_over = False
        if not self.has_weight or not isinstance(quantization, AscendQuantizationConfig):
            return
        self._hands_integers_over = quantization.description.has_dynamic_layers
        if quantization.description.has_norm_biases:
            self.bias = torch.nn.Parameter(torch.zeros_like(self.weight), requires_grad=False)
            set_weight_attrs(self.bias, {"weight_loader": self._load_bias})

    def _load_bias(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """Which norms have one, only the checkpoint knows."""
        default_weight_loader(parameter, loaded)
        self._loaded_bias = parameter.data

    @property
    def is_plain(self) -> bool:
        """Whether it is one norm with a weight, over all of the last dimension, and no more."""
        return self.variance_size_override is None and self.has_weight and self._loaded_bias is None

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalizes x, or x + residual, over the last dimension.

        x:        [..., hidden_size]
        residual: shape and dtype of x, or None
        Returns the normalized tensor, or that and the sum. Accumulates in fp32.
        """
        if self.variance_size_override is not None or not self.has_weight:
            return self.forward_native(x, residual)
        if residual is None:
            if norm := compiled("rms_norm"):
                normalized = norm(x, self.weight, self.variance_epsilon)
            else:
                normalized = torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        elif (
            self._hands_integers_over
            and self._loaded_bias is None
            and x.dim() == 2
            and (quantize := compiled("add_rms_norm_dynamic_quant"))
        ):
            return self._quantized(quantize, x, residual)
        else:
            normalized, total = self._of_sum(x, residual)
        if self._loaded_bias is not None:
            normalized.add_(self._loaded_bias)
        return normalized if residual is None else (normalized, total)

    def _of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, without bias, and that sum."""
        if add_norm := compiled("add_rms_norm"):
            normalized, total = add_norm(x, residual, self.weight, self.variance_epsilon)
        else:
            normalized, _, total = torch_npu.npu_add_rms_norm(
                x, residual, self.weight, self.variance_epsilon
            )
        return normalized, total

    def _quantized(
        self,
        add_norm_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        x: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_of_sum`, quantized for the layer behind it. Ends when that turns out to be another."""
        integers, scales, total = add_norm_quantize(x, residual, self.weight, self.variance_epsilon)

        def values() -> torch.Tensor:
            self._hands_integers_over = False
            return self._of_sum(x, residual)[0]

        return QuantizedNorm.of(integers, scales, x.dtype, values), total
