"""Gated DeltaNet in a model (Qwen3-Next, Qwen3.5): vLLM's layer on torch's operators."""

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan
from vllm_davinci.core.linear_attention.delta_rule import (
    Heads,
    chunked_delta_rule,
    l2_normalized,
    recurrent_delta_rule,
)
from vllm_davinci.core.linear_attention.layer import StatefulLayer


class NPUQwenGatedDeltaNetAttention(StatefulLayer, QwenGatedDeltaNetAttention):
    """vLLM's layer, with its projections and weights; the stages between them are here.

    Its gates are the logarithm of each value head's decay, then its rate.
    """

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        kept = (self.conv_kernel_size - 1, self.conv_dim // self.tp_size)
        return kept, (self.num_v_heads // self.tp_size, self.head_v_dim, self.head_k_dim)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_tokens, hidden_size]. Returns as much. On the current stream."""
        qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            *qkv, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
            mixed = torch.cat([part.flatten(1) for part in qkv], dim=-1)
        else:
            own_sizes = [self.conv_dim // self.tp_size, self.value_dim // self.tp_size]
            mixed, z = qkvz.split(own_sizes, dim=-1)
            z = z.unflatten(-1, (-1, self.head_v_dim))
            b, a = self.split_ba(ba)
        decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        gates = torch.cat([decay, b.float().sigmoid()], dim=-1)
        return self._output_projection(self.run_step(mixed, gates).to(hidden_states.dtype), z)

    def _decoded(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        own = self._per_key_head(state)
        return recurrent_delta_rule(self._heads(x, gates), own).flatten(1, 2)

    def _prefilled(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        own = self._per_key_head(state)
        return chunked_delta_rule(self._heads(x, gates), own, plan).flatten(1, 2)

    def _heads(self, x: torch.Tensor, gates: torch.Tensor) -> Heads:
        own_key_dim, own_value_dim = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        query, key, value = x.split([own_key_dim, own_key_dim, own_value_dim], dim=-1)
        by_head = (-1, self.head_k_dim)
        decay, rate = self._per_key_head(gates.unflatten(1, (2, -1)), dim=2).unbind(1)
        return Heads(
            l2_normalized(query.unflatten(-1, by_head)) * self.head_k_dim**-0.5,
            l2_normalized(key.unflatten(-1, by_head)),
            self._per_key_head(value.unflatten(-1, (-1, self.head_v_dim))),
            decay.unsqueeze(-1),
            rate,
        )

    def _per_key_head(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Divides the dimension of value heads by key heads: [.., num_key_heads, repeats, ..]."""
        return x.unflatten(dim, (-1, self.num_v_heads // self.num_k_heads))
