"""Kimi-K3: vLLM's tower for images, and the text model of `kimi_linear`."""

from vllm.models.kimi_k3.amd.model import KimiK3ForConditionalGeneration


class NPUKimiK3ForConditionalGeneration(KimiK3ForConditionalGeneration):
    """vLLM's model for platforms with their own layers."""
