"""DeepSeek-V2, V3 and R1 whose tokens are divided among ranks between attention and experts.

vLLM's definition sums the parts that tensor-parallel ranks have computed over all ranks, and each
rank then repeats norm, residual sum and the down-projections of attention for every token. Here
each rank receives the sum of its share of the tokens only, does that work on its share, and what
attention or experts need of the others is gathered: the compressed rows, where attention has them.
Reduction, that work and gathering are one exchange: other micro-batches compute beside all of it.
"""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

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
from vllm_davinci.core.distributed.exchange import exchange
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ops.mla import NPUMultiHeadLatentAttention
from vllm_davinci.core.overlap.shares import shares_obstacle
from vllm_davinci.models.token_shares import TokenShares

logger = init_logger(__name__)


class Divided(NamedTuple):
    """Hidden states on their way between ranks: settled shares of the rows, or parts of sums.

    rows:  [size, hidden_size] of this rank, or its part of all sums: [num_tokens, hidden_size]
    is_partial: which of the two
    scale: of the sum, where float16 wants smaller numbers
    """

    rows: torch.Tensor
    is_partial: bool = False
    scale: float = 1.0

    def settle(self, shares: TokenShares) -> torch.Tensor:
        """This rank's share of the rows."""
        if not self.is_partial:
            return self.rows
        share = shares.reduce(self.rows)
        return share if self.scale == 1.0 else share.mul_(self.scale)


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, then the dense or sparse MLP, of rows that every rank has.

        positions:               [num_tokens], int64
        hidden_states, residual: [num_tokens, hidden_size]
        llama_4_scaling:         must be None: no DeepSeek has it
        Returns hidden states and residual of the same rows.
        """
        assert llama_4_scaling is None
        (attention,) = self.attention
        hidden_states, residual = self._norm(self.input_layernorm, hidden_states, residual)
        hidden_states = tensor_model_parallel_all_reduce(attention(positions, hidden_states))
        scale, residual = self._after_attention(hidden_states.dtype, residual)
        if scale != 1.0:
            hidden_states *= scale
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = tensor_model_parallel_all_reduce(self.mlp(hidden_states))
        if (scale := self._after_mlp(hidden_states.dtype)) != 1.0:
            hidden_states *= scale
        return hidden_states, residual

    def forward_divided(
        self,
        positions: torch.Tensor,
        hidden_states: Divided,
        residual: torch.Tensor | None,
        shares: TokenShares,
    ) -> tuple[Divided, torch.Tensor]:
        """The same; each rank has its share of residual and hidden states.

        positions: [num_tokens], int64; residual: [size, hidden_size]
        """
        (attention,) = self.attention
        is_compressed = attention.q_lora_rank is not None

        def before_attention() -> tuple[torch.Tensor, torch.Tensor]:
            share, share_residual = self._norm(
                self.input_layernorm, hidden_states.settle(shares), residual
            )
            # Without compressed queries only keys and values would be.
            return shares.gather(
                attention.compress(share) if is_compressed else share
            ), share_residual

        rows, after = exchange(before_attention)
        attend = attention.forward_compressed if is_compressed else attention
        partial = attend(positions, rows)

        scale, after = self._after_attention(partial.dtype, after)
        attended = Divided(partial, True, scale)

        def before_mlp() -> tuple[torch.Tensor, torch.Tensor]:
            share, share_residual = self.post_attention_layernorm(attended.settle(shares), after)
            return shares.gather(share), share_residual

        rows, share_residual = exchange(before_mlp)
        return Divided(self.mlp(rows), True, self._after_mlp(rows.dtype)), share_residual

    @staticmethod
    def _norm(
        norm: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return norm(hidden_states), hidden_states
        normed, total = norm(hidden_states, residual)
        return normed, total

    def _after_attention(
        self, dtype: torch.dtype, residual: torch.Tensor
    ) -> tuple[float, torch.Tensor]:
        """Factor of attention's sum, and the residual.

        As vLLM does: in float16, smaller numbers, which the next norm makes the same, do not
        overflow.
        """
        if dtype != torch.float16:
            return 1.0, residual
        scale = 1.0 / self.routed_scaling_factor
        return scale, residual * scale if self.layer_idx == 0 else residual

    def _after_mlp(self, dtype: torch.dtype) -> float:
        return 1.0 / self.routed_scaling_factor if self.is_dense and dtype == torch.float16 else 1.0


class NPUDeepseekV2Model(DeepseekV2Model):
    """vLLM's model; it divides the tokens of large steps among the tensor-parallel ranks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = get_config(vllm_config).sequence_parallel
        self.min_tokens_to_divide = options.min_tokens
        self.divides_tokens = options.enabled and shares_obstacle(vllm_config) is None
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

        layers = islice(self.layers, self.start_layer, self.end_layer)
        if positions.shape[0] >= self.min_tokens_to_divide:
            return self._forward_divided(layers, positions, hidden_states, residual)
        for layer in layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if get_pp_group().is_last_rank:
            return self.norm(hidden_states, residual)[0]
        assert residual is not None
        return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})

    def _forward_divided(
        self,
        layers: Iterable[nn.Module],
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor | IntermediateTensors:
        shares = TokenShares.of_step(positions.shape[0])
        divided = Divided(shares.take(hidden_states))
        residual = None if residual is None else shares.take(residual)
        for layer in layers:
            assert isinstance(layer, NPUDeepseekV2DecoderLayer)
            divided, residual = layer.forward_divided(positions, divided, residual, shares)

        if get_pp_group().is_last_rank:
            return exchange(lambda: shares.gather(self.norm(divided.settle(shares), residual)[0]))
        assert residual is not None
        gathered, gathered_residual = exchange(
            lambda: (shares.gather(divided.settle(shares)), shares.gather(residual))
        )
        return IntermediateTensors({"hidden_states": gathered, "residual": gathered_residual})


class NPUDeepseekV2ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V2 and V2-Lite."""

    model_cls = NPUDeepseekV2Model


class NPUDeepseekV3ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3 and R1."""

    model_cls = NPUDeepseekV2Model
