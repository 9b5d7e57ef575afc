"""The vLLM platform for Ascend NPUs."""

import vllm  # noqa: F401  first: importing vLLM loads its platform, which is in this package

from vllm_davinci.core import attention, components, errors, layers
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.platform import NPUPlatform

__all__ = [
    "DavinciConfig",
    "NPUPlatform",
    "attention",
    "components",
    "errors",
    "get_config",
    "layers",
]
