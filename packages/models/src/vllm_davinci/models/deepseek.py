"""DeepSeek-V2, V3 and R1 whose tokens are divided among ranks between attention and experts.

vLLM's definition sums the parts that tensor-parallel ranks have computed over all ranks, and each
rank then repeats norm, residual sum and the down-projections of attention for every token. Here
each rank receives the sum of its share of the tokens only, does that work on its share, and what
attention or experts need of the others is gathered: the compressed rows, where attention has them.
"""

from itertools import islice

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.models.deepseek_v2 import (
    DeepseekV2DecoderLayer,
    DeepseekV2ForCausalLM,
    DeepseekV2MLP,
    DeepseekV2Model,
    DeepseekV3ForCausalLM,
)
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.config import get_config
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ops.mla import NPUMultiHeadLatentAttention
from vllm_davinci.models.token_shares import TokenShares

logger = init_logger(__name__)


class NPUDeepseekV2DecoderLayer(DeepseekV2DecoderLayer):
    """One layer, whose two sums over ranks are reductions of all tokens or of a share of them."""

    def __init__(self, layer: DeepseekV2DecoderLayer) -> None:
        """Takes over the modules of vLLM's layer, under the same names."""
        nn.Module.__init__(self)
        self.layer_idx = layer.layer_idx
        self.hidden_size = layer.hidden_size
        self.use_mha = layer.use_mha
        self.use_sequence_parallel_moe = layer.use_sequence_parallel_moe
        self.routed_scaling_factor = layer.routed_scaling_factor
        for name, module in layer.named_children():
            self.add_module(name, module)
        attention = layer.self_attn.mla_attn
        assert isinstance(attention, NPUMultiHeadLatentAttention)
        self.attention = (attention,)  # in a tuple: it is registered below self_attn already
        self.is_dense = isinstance(layer.mlp, DeepseekV2MLP)
        # The sums over ranks are this layer's to make.
        attention.o_proj.reduce_results = False
        if self.is_dense:
            layer.mlp.down_proj.reduce_results = False
        else:
            layer.mlp.experts.moe_config.skip_final_all_reduce = True

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        llama_4_scaling: torch.Tensor | None = None,
        shares: TokenShares | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, then the dense or sparse MLP.

        positions:               [num_tokens], int64
        hidden_states, residual: [num_tokens, hidden_size], or one share of the rows
        llama_4_scaling:         must be None: no DeepSeek has it
        shares:                  how the step's rows are divided, None when every rank has all
        Returns hidden states and residual of the same rows.
        """
        assert llama_4_scaling is None
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self._sum(self._attend(positions, hidden_states, shares), shares)
        if hidden_states.dtype == torch.float16:
            # As vLLM does: smaller numbers, which the next norm makes the same, do not overflow.
            hidden_states *= 1.0 / self.routed_scaling_factor
            if self.layer_idx == 0:
                residual *= 1.0 / self.routed_scaling_factor

        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        rows = hidden_states if shares is None else shares.gather(hidden_states)
        hidden_states = self._sum(self.mlp(rows), shares)
        if self.is_dense and hidden_states.dtype == torch.float16:
            hidden_states *= 1.0 / self.routed_scaling_factor
        return hidden_states, residual

    def _attend(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, shares: TokenShares | None
    ) -> torch.Tensor:
        """This rank's part of attention's output for all tokens."""
        (attention,) = self.attention
        if shares is None:
            return attention(positions, hidden_states)
        if attention.q_lora_rank is None:  # only keys and values are compressed
            return attention(positions, shares.gather(hidden_states))
        compressed = shares.gather(attention.compress(hidden_states))
        return attention.forward_compressed(positions, compressed)

    @staticmethod
    def _sum(partial: torch.Tensor, shares: TokenShares | None) -> torch.Tensor:
        return (
            tensor_model_parallel_all_reduce(partial) if shares is None else shares.reduce(partial)
        )


class NPUDeepseekV2Model(DeepseekV2Model):
    """vLLM's model; it divides the tokens of large steps among the tensor-parallel ranks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = get_config(vllm_config).sequence_parallel
        self.min_tokens_to_divide = options.min_tokens
        self.divides_tokens = options.enabled and _can_divide(vllm_config)
        if self.divides_tokens:
            logger.info_once(
                "Steps of %d tokens or more are divided among %d tensor-parallel ranks between "
                "attention and experts.",
                options.min_tokens,
                vllm_config.parallel_config.tensor_parallel_size,
            )
            for index, layer in enumerate(self.layers):
                if not isinstance(layer, PPMissingLayer):
                    self.layers[index] = NPUDeepseekV2DecoderLayer(layer)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """See DeepseekV2Model.forward: all rows in, all rows out, on every rank."""
        if not self.divides_tokens:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        residual: torch.Tensor | None = None
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        elif inputs_embeds is not None:
            hidden_states = inputs_embeds
        else:
            hidden_states = self.embed_input_ids(input_ids)

        shares = None
        if positions.shape[0] >= self.min_tokens_to_divide:
            shares = TokenShares.of_step(positions.shape[0])
            hidden_states = shares.take(hidden_states)
            residual = None if residual is None else shares.take(residual)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual, shares=shares)

        if get_pp_group().is_last_rank:
            hidden_states, _ = self.norm(hidden_states, residual)
            return hidden_states if shares is None else shares.gather(hidden_states)
        assert residual is not None
        if shares is not None:
            hidden_states, residual = shares.gather(hidden_states), shares.gather(residual)
        return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})


def _can_divide(vllm_config: VllmConfig) -> bool:
    """Whether ranks repeat work on the same tokens, and nobody else divides them."""
    parallel = vllm_config.parallel_config
    return (
        vllm_config.model_config.use_mla
        and parallel.tensor_parallel_size > 1
        and parallel.data_parallel_size == 1
        and not parallel.use_sequence_parallel_moe
        and vllm_config.speculative_config is None
    )


class NPUDeepseekV2ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V2 and V2-Lite."""

    model_cls = NPUDeepseekV2Model


class NPUDeepseekV3ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3 and R1."""

    model_cls = NPUDeepseekV2Model
