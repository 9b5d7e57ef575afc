"""Linear layers whose quantized weights are converted to floats once, after loading."""

import torch

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase, plain_tensor


class FloatsAtLoadLinearMethod(QuantizedLinearMethodBase):
    """A layer from which MLA derives its absorbed matrices: `kv_b_proj`."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        floats = self.scheme.floats(lambda name: plain_tensor(layer, name)).to(self._dtype)
        for name in self._loaders:
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(floats, requires_grad=False)
        method = NPUUnquantizedLinearMethod()
        method.process_weights_after_loading(layer)
        layer.quant_method = method

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise CheckpointError(
            f"{self.prefix} is used before its weights were prepared: load the model through vLLM."
        )
