"""FLOAT: weights in the model's dtype."""

from typing import TYPE_CHECKING, Any

from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.quantization.scheme import FLOAT, SCHEMES, LayerSettings, Scheme
from vllm_davinci.core.quantization.tensors import Extent, TensorSpec

if TYPE_CHECKING:
    pass


@SCHEMES.register
class Float(Scheme):
    name = FLOAT
    parameters = (TensorSpec("weight", Extent.MATRIX),)
    is_written = True  # only from fp8 sources

    def linear(self, prefix: str, settings: LayerSettings) -> NPUUnquantizedLinearMethod:
        return NPUUnquantizedLinearMethod()

    def experts(self, *args: Any, **kwargs: Any) -> None:
        """Returns None: vLLM then uses its method of unquantized experts."""
