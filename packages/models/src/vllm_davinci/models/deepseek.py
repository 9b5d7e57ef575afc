"""DeepSeek-V2, V3 and R1, sequence parallel between attention and experts.

Before attention, ranks gather compressed rows if attention uses them: the down-projections, which
every rank holds whole, are computed only for the rank's shard of tokens.
"""

import torch
from torch import nn
from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2DecoderLayer,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
)

from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.models.decoder_layer import NPUDecoderLayer
from vllm_davinci.models.sequence_parallel import SequenceParallel


class NPUDeepseekV2DecoderLayer(NPUDecoderLayer):
    """One layer with MLA."""

    def __init__(self, layer: DeepseekV2DecoderLayer) -> None:
        super().__init__(layer)
        self.layer_idx = layer.layer_idx
        self.use_sequence_parallel_moe = layer.use_sequence_parallel_moe  # vLLM's model reads it
        self.routed_scaling_factor = layer.routed_scaling_factor

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        attention = getattr(layer.self_attn, "mla_attn", None)
        return NPUDecoderLayer.fits(layer) and isinstance(
            attention, NPUMultiHeadLatentAttentionWrapper
        )

    @property
    def attention(self) -> NPUMultiHeadLatentAttentionWrapper:
        attention = self.self_attn.mla_attn
        assert isinstance(attention, NPUMultiHeadLatentAttentionWrapper)
        return attention

    def output_projection(self) -> nn.Module:
        return self.attention.o_proj

    def attend(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.attention(positions, hidden_states)

    def attention_input(self, shard: torch.Tensor) -> torch.Tensor:
        # Without compressed queries, only keys and values would be computed here.
        return shard if self.attention.q_lora_rank is None else self.attention.compress(shard)

    def attend_gathered(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.attention.q_lora_rank is None:
            return self.attend(positions, rows)
        return self.attention.forward_compressed(positions, rows)

    def after_attention(
        self, dtype: torch.dtype, residual: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """The factor of attention's sum, and the residual.

        As in vLLM: smaller numbers avoid overflow in float16; the next norm removes the factor.
        """
        if dtype != torch.float16:
            return 1.0, residual
        scale = 1.0 / self.routed_scaling_factor
        return scale, residual * scale if self.layer_idx == 0 else residual

    def after_mlp(self, dtype: torch.dtype) -> float:
        return 1.0 / self.routed_scaling_factor if self.is_dense and dtype == torch.float16 else 1.0


class NPUDeepseekV2ForCausalLM(SequenceParallel, DeepseekV2ForCausalLM):
    """DeepSeek-V2 and V2-Lite."""

    layer_type = NPUDeepseekV2DecoderLayer


class NPUDeepseekV3ForCausalLM(SequenceParallel, DeepseekV3ForCausalLM):
    """DeepSeek-V3 and R1."""

    layer_type = NPUDeepseekV2DecoderLayer
