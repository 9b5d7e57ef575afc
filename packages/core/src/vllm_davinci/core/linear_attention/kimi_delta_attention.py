"""Kimi delta attention in a model (Kimi Linear): vLLM's layer on torch operators."""

from typing import Any

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan
from vllm_davinci.core.linear_attention.delta_rule import (
    Heads,
    chunked_delta_rule,
    l2_normalized,
    recurrent_delta_rule,
)
from vllm_davinci.core.linear_attention.layer import StatefulLayer


class NPUKimiGatedDeltaNetAttention(StatefulLayer, KimiGatedDeltaNetAttention):
    """vLLM's layer; the stages between its projections are replaced.

    The delta rule with one value head per key head and a decay per key channel. Its gates are the
    logarithms of these decays, head by head, then each head's rate.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conv_kernel_size = self.conv_size
        refused = {
            "gates of full rank (use_full_rank_gate)": self.use_full_rank_gate,
            "a lower bound of its decays (gate_lower_bound)": self.gate_lower_bound is not None,
        }
        if named := [what for what, is_asked in refused.items() if is_asked]:
            raise UnsupportedFeatureError(
                f"{self.prefix} needs {' and '.join(named)}, which {RELEASE} does not support. "
                "Choose Kimi-Linear, which has neither."
            )

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        kept = (self.conv_kernel_size - 1, 3 * self.local_projection_size)
        return kept, (self.local_num_heads, self.head_dim, self.head_dim)

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden_states: [num_tokens, hidden_size]. Returns the same shape. On the current stream.

        positions: unused: the rule depends only on the order of tokens
        """
        projected, _ = self.in_proj_qkvgfab(hidden_states)
        mixed, rate, compressed = projected.split(
            [3 * self.local_projection_size, self.local_num_heads, self.head_dim], dim=-1
        )
        step = self.f_b_proj(compressed.contiguous())[0].float() + self.dt_bias.float()
        decay = softplus(step).unflatten(-1, (-1, self.head_dim))
        decay = decay * -self.A_log.float().exp().unsqueeze(-1)
        gates = torch.cat([decay.flatten(1), rate.float().sigmoid()], dim=-1)
        out = self.run_step(mixed, gates)
        z = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0].unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self._gated_norm(out, z).to(hidden_states.dtype).flatten(1))[0]

    def _gated_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The gated norm in fp32. out: [num_tokens, heads, head size], fp32; z: the same shape"""
        norm = self.o_norm
        out = out * torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + norm.eps)
        return out * norm.weight.float() * z.float().sigmoid()

    def _decoded(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return recurrent_delta_rule(self._heads(x, gates), state.unsqueeze(2)).flatten(1, 2)

    def _prefilled(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        return chunked_delta_rule(self._heads(x, gates), state.unsqueeze(2), plan).flatten(1, 2)

    def _heads(self, x: torch.Tensor, gates: torch.Tensor) -> Heads:
        of_heads = (self.local_num_heads, self.head_dim)
        query, key, value = x.unflatten(-1, (3, *of_heads)).unbind(1)
        decay, rate = gates.split([self.local_projection_size, self.local_num_heads], dim=-1)
        return Heads(
            l2_normalized(query) * self.head_dim**-0.5,
            l2_normalized(key),
            value.unsqueeze(2),
            decay.unflatten(-1, of_heads).unsqueeze(2),
            rate.unsqueeze(2),
        )
