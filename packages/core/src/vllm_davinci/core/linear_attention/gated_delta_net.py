"""Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid): vLLM's layers on torch's operators."""

from typing import Any

import torch
from torch.nn.functional import softplus
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan
from vllm_davinci.core.linear_attention.delta_rule import (
    Heads,
    chunked_delta_rule,
    l2_normalized,
    recurrent_delta_rule,
)
from vllm_davinci.core.linear_attention.layer import StatefulLayer


class GatedDeltaRule(StatefulLayer):
    """Mix-in: the stages between the projections of vLLM's layers.

    Its gates are the logarithm of each value head's decay, then its rate.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    conv_dim: int
    tp_size: int
    A_log: torch.nn.Parameter
    dt_bias: torch.nn.Parameter

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        kept = (self.conv_kernel_size - 1, self.conv_dim // self.tp_size)
        return kept, (self.num_v_heads // self.tp_size, self.head_v_dim, self.head_k_dim)

    def _gates(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Gates from projected steps and rates. a, b: [num_tokens, value heads] each"""
        decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias.float())
        return torch.cat([decay, b.float().sigmoid()], dim=-1)

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
        """Splits the dimension of value heads by key heads: [.., num_key_heads, repeats, ..]."""
        return x.unflatten(dim, (-1, self.num_v_heads // self.num_k_heads))


class NPUQwenGatedDeltaNetAttention(GatedDeltaRule, QwenGatedDeltaNetAttention):
    """vLLM's layer, with its projections and weights."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [num_tokens, hidden_size]. Returns the same shape. Current stream."""
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
        out = self.run_step(mixed, self._gates(a, b))
        return self._output_projection(out.to(hidden_states.dtype), z)


class NPUOlmoHybridGatedDeltaNetAttention(GatedDeltaRule, OlmoHybridGatedDeltaNetAttention):
    """vLLM's layer, its projections and weights. Rates reach 2 if eigenvalues may be negative."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        # vLLM's own constructor allocates memory for Triton kernels, which are not used here.
        GatedDeltaNetAttention.__init__(self, config, vllm_config, prefix)
        self.num_k_heads, self.head_k_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.num_v_heads = config.linear_num_value_heads
        self.head_v_dim = config.linear_value_head_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim
        self.key_dim = self.head_k_dim * self.num_k_heads
        self.value_dim = self.head_v_dim * self.num_v_heads
        self.allow_neg_eigval = config.linear_allow_neg_eigval
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        self.conv_dim = sum(sizes)
        options = {"bias": False, "quant_config": self.quant_config}
        self.in_proj_qkvg = MergedColumnParallelLinear(
            self.hidden_size, [*sizes, self.value_dim], prefix=f"{prefix}.in_proj_qkvg", **options
        )
        for name in ("a_proj", "b_proj"):
            projection = ColumnParallelLinear(
                self.hidden_size, self.num_v_heads, prefix=f"{prefix}.{name}", **options
            )
            setattr(self, name, projection)
        self.conv1d = MergedColumnParallelLinear(
            self.conv_kernel_size, sizes, bias=False, prefix=f"{prefix}.conv1d"
        )
        load = self.conv1d.weight.weight_loader
        self.conv1d.weight.weight_loader = lambda parameter, loaded, part: load(
            parameter, loaded.flatten(1), part
        )
        for name in ("A_log", "dt_bias"):
            parameter = torch.nn.Parameter(torch.empty(self.num_v_heads // self.tp_size))
            set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
            setattr(self, name, parameter)
        # The epsilon of the operator that the authors train with.
        self.o_norm = RMSNormGated(self.head_v_dim, eps=1e-5, norm_before_gate=True)
        self.o_proj = RowParallelLinear(
            self.value_dim, self.hidden_size, prefix=f"{prefix}.o_proj", **options
        )
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def forward(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """hidden_states, output: [num_tokens, hidden_size]; the second is written."""
        own_sizes = [self.conv_dim // self.tp_size, self.value_dim // self.tp_size]
        mixed, z = self.in_proj_qkvg(hidden_states)[0].split(own_sizes, dim=-1)
        a, b = self.a_proj(hidden_states)[0], self.b_proj(hidden_states)[0]
        out = self.run_step(mixed, self._gates(a, b)).to(hidden_states.dtype)
        by_head = (-1, self.head_v_dim)
        normed = self.o_norm(out.reshape(by_head), z.reshape(by_head))
        output.copy_(self.o_proj(normed.view(len(hidden_states), -1))[0])

    def _gates(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gates = super()._gates(a, b)
        if self.allow_neg_eigval:
            gates[:, a.shape[-1] :] *= 2
        return gates
