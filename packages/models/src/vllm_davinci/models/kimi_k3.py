"""Kimi-K3: vLLM's tower for images, and the text model of `kimi_linear`."""

from typing import ClassVar

from vllm.models.kimi_k3.amd.model import KimiK3ForConditionalGeneration

from vllm_davinci.models.kimi_linear import PACKED_MODULES


class NPUKimiK3ForConditionalGeneration(KimiK3ForConditionalGeneration):
    """vLLM's model for platforms with their own layers."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES
