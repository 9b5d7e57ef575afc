"""Registers quantization with vLLM, and selects it for a checkpoint with a description."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.platforms.interface import PlatformEnum
from vllm.transformers_utils.repo_utils import file_or_path_exists

from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.config import (
    DESCRIPTION,
    NAME,
    AscendQuantizationConfig,
    is_described,
)
from vllm_davinci.core.quantization.format import FORMATS
from vllm_davinci.core.quantization.scaled_mm import NPUInt8ScaledMMLinearKernel

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def register() -> None:
    """Registers `--quantization ascend` and the methods of the formats. Idempotent."""
    if NAME in QUANTIZATION_METHODS:
        return
    register_quantization_config(NAME)(AscendQuantizationConfig)
    FORMATS.read()  # imports the formats' files, which register names with vLLM
    register_linear_kernel(NPUInt8ScaledMMLinearKernel, PlatformEnum.OOT, kernel_type="int8")


def choose_quantization(vllm_config: VllmConfig) -> None:
    """Selects the quantization of a checkpoint that has a description.

    The user's option takes precedence. Raises an error if the description cannot be read.
    """
    model = vllm_config.model_config
    if model is None or model.quantization is not None or vllm_config.quant_config is not None:
        return
    directory = Path(model.model)
    if not (
        is_described(directory)
        if directory.is_dir()
        else file_or_path_exists(model.model, DESCRIPTION, model.revision)
    ):
        return
    model.quantization = NAME
    vllm_config.quant_config = vllm_config.get_quantization_config(model, vllm_config.load_config)
    assert isinstance(vllm_config.quant_config, AscendQuantizationConfig)
    logger.info_once(
        "quantization: None -> %s (the checkpoint carries %s)",
        NAME,
        vllm_config.quant_config.description.source,
    )
