"""Kimi delta attention in a model (Kimi-Linear, Kimi-K3): vLLM's layers on torch operators."""

from typing import Any

import torch
from torch.nn.functional import softplus
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

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
        if self.in_proj_padding:
            self._load_padding()

    def _load_padding(self) -> None:
        """Loads zeros into the last part of the input projection, which no checkpoint has."""
        num_rows = self.in_proj_padding * self.tp_size
        for name, parameter in self.in_proj_qkvgfab.named_parameters():
            values = parameter.new_full((num_rows, *parameter.shape[1:]), "scale" in name)
            parameter.weight_loader(parameter, values, 6)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        kept = (self.conv_kernel_size - 1, 3 * self.local_projection_size)
        return kept, (self.local_num_heads, self.head_dim, self.head_dim)

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden_states: [num_tokens, hidden_size]. Returns the same shape. On the current stream.

        positions: unused: the rule depends only on the order of tokens
        """
        mixed, compressed, rate, z = self._projected(hidden_states)
        step = self.f_b_proj(compressed.contiguous())[0].float() + self.dt_bias.float()
        decay = self._decay(step.unflatten(-1, (-1, self.head_dim)))
        gates = torch.cat([decay.flatten(1), rate.float().sigmoid()], dim=-1)
        out = self.run_step(mixed, gates)
        z = z.unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self._gated_norm(out, z).to(hidden_states.dtype).flatten(1))[0]

    def _projected(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the convolution, of the decays' up-projection, of rates, and of the gate."""
        projected, _ = self.in_proj_qkvgfab(hidden_states)
        size, heads = self.local_projection_size, self.local_num_heads
        if self.use_full_rank_gate:
            sizes = [3 * size, size, self.head_dim, heads, self.in_proj_padding]
            mixed, z, compressed, rate, _ = projected.split(sizes, dim=-1)
        else:
            mixed, rate, compressed = projected.split([3 * size, heads, self.head_dim], dim=-1)
            z, _ = self.g_b_proj(self.g_a_proj(hidden_states)[0])
        return mixed, compressed, rate, z

    def _decay(self, step: torch.Tensor) -> torch.Tensor:
        """Logarithms of decays, perhaps with a lower bound. step: [num_tokens, heads, head size]"""
        rate = self.A_log.float().exp().unsqueeze(-1)
        if self.gate_lower_bound is None:
            return softplus(step) * -rate
        return (step * rate).sigmoid() * self.gate_lower_bound

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
