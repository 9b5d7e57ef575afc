"""A quantization scheme in one file, like those in core's `quantization/schemes`.

With the option `worker_extension_cls`, an engine's workers import this module.
"""

from collections.abc import Callable

import torch

from vllm_davinci.core.quantization.floats_at_load import FloatsAtLoadLinearMethod
from vllm_davinci.core.quantization.rounding import FloatLayer, rounded_per_channel
from vllm_davinci.core.quantization.scheme import SCHEMES, Scheme
from vllm_davinci.core.quantization.tensors import INT8_WEIGHT, Extent, TensorSpec


@SCHEMES.register
class PowersOfTwo(Scheme):
    """int8 weights with a power-of-two scale per channel; files store the exponent."""

    name = "W8_POWERS_OF_TWO"
    parameters = (INT8_WEIGHT, TensorSpec("exponent", Extent.CHANNEL_COLUMN))
    linear_method = FloatsAtLoadLinearMethod
    is_written = True

    def floats(self, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return tensor("weight").float() * tensor("exponent").float().exp2()

    def rounded(self, layer: FloatLayer) -> dict[str, torch.Tensor]:
        exponent = rounded_per_channel(layer.weight)[1].log2().ceil()
        integers = (layer.weight.float() / exponent.exp2()).round().char()
        return {"weight": integers, "exponent": exponent}


class Workers:
    """Mixed into the workers, which thereby import this module."""
