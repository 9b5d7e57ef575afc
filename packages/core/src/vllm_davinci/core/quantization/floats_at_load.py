"""Quantized weights that are needed as floats, which are computed once."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.quantization.description import WEIGHT_ONLY, QuantType
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase, plain_tensor
from vllm_davinci.core.quantization.tensors import deq_scale_as_float
from vllm_davinci.core.quantization.weight_only import floats_of


@register_weight_loader_v2_supported_method
class FloatsAtLoadLinearMethod(QuantizedLinearMethodBase):
    """A layer of which MLA derives its absorbed matrices: `kv_b_proj`.

    The scale of a static layer's weight is deq_scale / input_scale.
    """

    def __init__(self, kind: QuantType, prefix: str, is_loaded: bool, group_size: int = 0) -> None:
        super().__init__(prefix, is_loaded, group_size)
        self.kind = kind

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        floats = self._floats(layer).to(self._dtype)
        for name in self._loaders:
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(floats, requires_grad=False)
        method = NPUUnquantizedLinearMethod()
        method.process_weights_after_loading(layer)
        layer.quant_method = method

    def _floats(self, layer: torch.nn.Module) -> torch.Tensor:
        """[out, in] fp32."""
        weight = plain_tensor(layer, "weight")
        if self.kind in WEIGHT_ONLY:
            scale, offset = (plain_tensor(layer, f"weight_{part}") for part in ("scale", "offset"))
            floats = floats_of(weight.cpu(), scale.cpu(), offset.cpu(), self.kind)
            return floats.to(weight.device)
        if self.kind is QuantType.W8A8:
            deq_scale = deq_scale_as_float(plain_tensor(layer, "deq_scale").cpu())
            scale = deq_scale / plain_tensor(layer, "input_scale").cpu()
            return weight.float() * scale.unsqueeze(1).to(weight.device)
        return weight.float() * plain_tensor(layer, "weight_scale").float()

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise CheckpointError(
            f"{self.prefix} is used before its weights were prepared: load the model through vLLM."
        )
