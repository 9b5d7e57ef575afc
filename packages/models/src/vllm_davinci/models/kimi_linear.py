"""Kimi-Linear: Kimi delta attention, MLA without positions, and experts.

vLLM gives other platforms its definition with CUDA kernels. Its ROCm definition consists of layers
that a platform can replace.
"""

from vllm.config import VllmConfig
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
from vllm.models.kimi_k3.amd.mla import KimiK3MultiHeadLatentAttentionWrapper

from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper


class NPUKimiMultiHeadLatentAttentionWrapper(
    NPUMultiHeadLatentAttentionWrapper, KimiK3MultiHeadLatentAttentionWrapper
):
    """MLA as in DeepSeek's models; nominally a `KimiK3MultiHeadLatentAttentionWrapper`."""


class NPUKimiLinearForCausalLM(KimiLinearForCausalLM):
    """vLLM's model on this platform's attention."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        name = KimiK3MultiHeadLatentAttentionWrapper.__name__
        if name not in op_registry_oot:
            PluggableLayer.register_oot(NPUKimiMultiHeadLatentAttentionWrapper, name=name)
        # vLLM pads narrow experts for ROCm's kernels; the grouped product supports any width.
        vllm_config.model_config.hf_text_config.min_moe_intermediate_per_partition = 1
        super().__init__(vllm_config=vllm_config, prefix=prefix)
