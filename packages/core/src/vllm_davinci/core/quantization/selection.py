"""A checkpoint that carries its description is loaded as it says, without an option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.config import NAME, read_description

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def choose_quantization(vllm_config: VllmConfig) -> None:
    """Sets the quantization of the engine's model when none is set and a description exists.

    Raises what reading the description raises.
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
