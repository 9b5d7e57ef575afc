"""Tells vLLM about our quantization: the configuration by name, the kernel by platform."""

from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.platforms.interface import PlatformEnum

from vllm_davinci.core.quantization import compressed_schemes
from vllm_davinci.core.quantization.compressed import NPUCompressedTensorsConfig
from vllm_davinci.core.quantization.config import NAME, AscendQuantizationConfig
from vllm_davinci.core.quantization.scaled_mm import NPUInt8ScaledMMLinearKernel


def register() -> None:
    """Registers `--quantization ascend` and int8 of compressed-tensors. Idempotent."""
    if NAME in QUANTIZATION_METHODS:
        return
    register_quantization_config(NAME)(AscendQuantizationConfig)
    register_quantization_config(compressed_schemes.NAME)(NPUCompressedTensorsConfig)
    register_linear_kernel(NPUInt8ScaledMMLinearKernel, PlatformEnum.OOT, kernel_type="int8")
