"""Kimi-Linear and Kimi-K3's text: Kimi delta attention, MLA without positions, and experts.

vLLM gives other platforms its definition with CUDA kernels. Its ROCm definition consists of layers
that a platform can replace. Attention residuals are a kernel there, and composed here.
"""

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import KimiK3MergedQKVGateLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.models.kimi_k3.amd.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.amd.latent_moe_runner import ROCmLatentMoERunner
from vllm.models.kimi_k3.amd.linear import KimiDecoderLayer, KimiLinearForCausalLM
from vllm.models.kimi_k3.amd.mla import KimiK3MultiHeadLatentAttentionWrapper
from vllm.sequence import IntermediateTensors
from vllm.utils.math_utils import cdiv

from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.core.linear_attention.kimi_delta_attention import NPUKimiGatedDeltaNetAttention
from vllm_davinci.models.attention_residuals import AttentionResiduals


class _NominalDeltaAttention(KimiK3DeltaAttention):
    """vLLM's Kimi-K3 layer in name only: its own constructor asks ROCm for kernels."""

    use_prefill_checkpoint = False
    decode_conv1d_weight = decode_norm_weight = None
    get_kv_cache_spec = MambaBase.get_kv_cache_spec

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        GatedDeltaNetAttention.__init__(self, config, vllm_config, prefix)
        # The convolution's activation; the configuration names that of MLPs.
        self.activation: str | None = "silu"


class NPUKimiK3DeltaAttention(NPUKimiGatedDeltaNetAttention, _NominalDeltaAttention):
    """Kimi-Linear's layer; nominally a `KimiK3DeltaAttention`."""


class NPUKimiMultiHeadLatentAttentionWrapper(
    NPUMultiHeadLatentAttentionWrapper, KimiK3MultiHeadLatentAttentionWrapper
):
    """MLA as in DeepSeek's models; nominally a `KimiK3MultiHeadLatentAttentionWrapper`."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
        skip_o_proj: bool = False,
    ) -> torch.Tensor:
        """See the base. In Kimi-K3 the compressing product also gives a gate of the output.

        skip_o_proj: False; another vendor's decodes contain the projection
        """
        assert not skip_o_proj
        if not isinstance(self.fused_qkv_a_proj, KimiK3MergedQKVGateLinear):
            return super().forward(positions, hidden_states, llama_4_scaling)
        assert self.q_lora_rank is not None
        size = self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim
        compressed, gate = self.compress(hidden_states).tensor_split([size], dim=-1)
        return self.forward_compressed(positions, compressed, gate)


# Layers that vLLM computes as one product -> their names in a checkpoint.
PACKED_MODULES = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "in_proj_qkvgfab": ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"],
}
REPLACED = {
    KimiK3DeltaAttention.__name__: NPUKimiK3DeltaAttention,
    KimiK3MultiHeadLatentAttentionWrapper.__name__: NPUKimiMultiHeadLatentAttentionWrapper,
}


class NPUKimiLinearForCausalLM(KimiLinearForCausalLM):
    """vLLM's model on this platform's attention."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        for name, layer in REPLACED.items():
            if name not in op_registry_oot:
                PluggableLayer.register_oot(layer, name=name)
        # vLLM pads narrow experts for ROCm's kernels; the grouped product supports any width.
        vllm_config.model_config.hf_text_config.min_moe_intermediate_per_partition = 1
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, ROCmLatentMoERunner):
                # Uses the base class's tail, with the same sums; ROCm's adds a product in place.
                module._tail_shardable = False

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """input_ids, positions: [num_tokens]; inputs_embeds: [num_tokens, hidden_size]

        Returns [num_tokens, hidden_size] before the last norm, or the next stage's tensors.
        """
        block_size = self.config.attn_res_block_size
        if block_size is None:
            return super().forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
            )
        model, completed = self.model, None
        if intermediate_tensors is not None:
            current = intermediate_tensors["hidden_states"]
            completed = intermediate_tensors["residual"]
        elif inputs_embeds is None:
            current = self.embed_input_ids(input_ids)
        else:
            current = inputs_embeds
        residuals = AttentionResiduals(current, completed, cdiv(model.end_layer, block_size) + 1)
        for layer in model.layers[model.start_layer : model.end_layer]:
            _compute_layer(layer, positions, residuals)
        if get_pp_group().is_last_rank:
            return residuals.mix(model.output_attn_res_norm, model.output_attn_res_proj)
        return IntermediateTensors(
            {"hidden_states": residuals.current, "residual": residuals.completed()}
        )


def _compute_layer(
    layer: KimiDecoderLayer, positions: torch.Tensor, residuals: AttentionResiduals
) -> None:
    """Adds a layer's attention and experts to the residual sums."""
    x = residuals.mix(layer.self_attention_res_norm, layer.self_attention_res_proj)
    x = layer.self_attn(hidden_states=layer.input_layernorm(x), positions=positions)
    if layer.is_block_write_layer:
        residuals.begin_block(x)
    else:
        residuals.add(x)
    x = residuals.mix(layer.mlp_res_norm, layer.mlp_res_proj)
    residuals.add(layer.mlp(layer.post_attention_layernorm(x)))
