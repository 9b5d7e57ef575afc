"""Makes quantization known to vLLM, and chooses it for a checkpoint that carries a description."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.platforms.interface import PlatformEnum

from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization import block_fp8, compressed_schemes
from vllm_davinci.core.quantization.compressed import NPUCompressedTensorsConfig
from vllm_davinci.core.quantization.config import (
    NAME,
    AscendQuantizationConfig,
    read_description,
)
from vllm_davinci.core.quantization.packed_config import NPUAWQConfig, NPUGPTQConfig
from vllm_davinci.core.quantization.scaled_mm import NPUInt8ScaledMMLinearKernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def register() -> None:
    """Registers `--quantization ascend` and ours of vLLM's methods. Idempotent."""
    if NAME in QUANTIZATION_METHODS:
        return
    register_quantization_config(NAME)(AscendQuantizationConfig)
    register_quantization_config(compressed_schemes.NAME)(NPUCompressedTensorsConfig)
    register_quantization_config(block_fp8.NAME)(block_fp8.NPUFp8Config)
    for packed in (NPUAWQConfig, NPUGPTQConfig):
        for name in (packed.method, packed.name):
            register_quantization_config(name)(packed)
    register_linear_kernel(NPUInt8ScaledMMLinearKernel, PlatformEnum.OOT, kernel_type="int8")


def choose_quantization(vllm_config: VllmConfig) -> None:
    """Sets the engine's quantization to that of a checkpoint that carries a description.

    An option that the user gave stays. Raises what reading the description raises.
    """
    model = vllm_config.model_config
    if model is None or model.quantization is not None or vllm_config.quant_config is not None:
        return
    description = read_description(model.model, model.revision)
    if description is None:
        return
    logger.info_once(
        "quantization: None -> %s (the checkpoint carries %s)", NAME, description.source
    )
    model.quantization = NAME
    vllm_config.quant_config = vllm_config.get_quantization_config(model, vllm_config.load_config)
