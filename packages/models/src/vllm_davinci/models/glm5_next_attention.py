"""Attention of GLM-5.3-Flash: Kimi's delta rule, and MLA without positions to chosen tokens."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from vllm_davinci.core.attention.compressed.pooled import PooledAttention, PooledKeys
from vllm_davinci.core.attention.compressed.row_indexer import key_page_rows
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.layers.quantized_activation import map_rows
from vllm_davinci.core.linear_attention.kimi_delta_attention import NPUKimiGatedDeltaNetAttention


class Glm5NextDeltaAttention(NPUKimiGatedDeltaNetAttention):
    """Kimi's layer with a lower bound of decays, by the keys of GLM's configuration."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
        own = SimpleNamespace(
            hidden_size=config.hidden_size,
            hidden_act=config.hidden_act,
            rms_norm_eps=config.rms_norm_eps,
            linear_attn_config={
                "head_dim": config.linear_head_dim,
                "num_heads": config.linear_num_heads,
                "short_conv_kernel_size": config.linear_conv_kernel_dim,
                "gate_lower_bound": config.linear_lower_bound,
            },
        )
        super().__init__(own, vllm_config, prefix)
        self.o_norm.eps = config.rms_norm_eps


class PoolIndexer(nn.Module):
    """Queries, weights and pooled keys with which a layer chooses groups of tokens."""

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant = vllm_config.quant_config
        self._heads, self._size = config.index_n_heads, config.index_head_dim
        self._scale = float(self._heads**-0.5 * self._size**-0.5)
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self._heads * self._size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.wq_b",
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size, self._heads, bias=False, prefix=f"{prefix}.weights_proj"
        )
        # Exports contain the gates' weights as a bare tensor of floats.
        projection = MergedColumnParallelLinear(
            config.hidden_size,
            [self._size] * 2,
            bias=False,
            disable_tp=True,
            prefix=f"{prefix}.keys.fused_wkv_wgate",
        )
        self.keys = PooledKeys(
            config.index_kpool,
            self._size,
            projection=projection,
            norm=nn.LayerNorm(self._size, eps=1e-6),
            dtype=vllm_config.model_config.dtype,
            prefix=f"{prefix}.keys",
            page_rows=key_page_rows(self._heads, self._size),
        )

    def project(self, x: torch.Tensor, q_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size]; q_c: [num_tokens, q_lora_rank], after its norm

        Returns queries [num_tokens, heads, size], and weights [num_tokens, heads] in fp32.
        """
        query = self.wq_b(q_c)[0].view(-1, self._heads, self._size)
        return query, self.weights_proj(x)[0].float() * self._scale


class Glm5NextAttention(nn.Module):
    """MLA without positions. Heads are divided among tensor-parallel ranks, rows are not.

    Queries are multiplied by the keys' up-projection, and outputs by the values'.
    """

    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant = vllm_config.quant_config
        heads, self._key, self._value = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.v_head_dim,
        )
        self._heads = heads // get_tensor_model_parallel_world_size()
        self._sizes = [config.q_lora_rank, config.kv_lora_rank]
        self.fused_qkv_a_proj = MergedColumnParallelLinear(
            config.hidden_size,
            self._sizes,
            bias=False,
            quant_config=quant,
            disable_tp=True,
            prefix=f"{prefix}.fused_qkv_a_proj",
        )
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.q_b_proj = ColumnParallelLinear(
            config.q_lora_rank,
            heads * self._key,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.q_b_proj",
        )
        self.kv_b_proj = ColumnParallelLinear(
            config.kv_lora_rank,
            heads * (self._key + self._value),
            bias=False,
            prefix=f"{prefix}.kv_b_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * self._value,
            config.hidden_size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
        )
        self.indexer = PoolIndexer(config, vllm_config, f"{prefix}.indexer")
        self.rows = PooledAttention(
            size=config.kv_lora_rank,
            dtype=vllm_config.model_config.dtype,
            scale=float(self._key**-0.5),
            keys=self.indexer.keys,
            num_chosen=min(config.index_topk, vllm_config.model_config.max_model_len)
            // config.index_kpool,
            prefix=prefix,
        )

    def forward(self, x: torch.Tensor, step: StepTokens | None) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; step: None in a profile run

        Returns [num_tokens, hidden_size]; zero in rows of padding.
        """
        if step is None:
            return self._profile(x)
        num_rows, num_tokens = x.shape[0], step.num_tokens
        x = map_rows(x, lambda rows: rows[:num_tokens])
        query, rows, q_c = self._project(x)
        self.indexer.keys.write_rows(x, step)
        out = self.rows.attend(query, rows, step, self.indexer.project(x, q_c))
        return nn.functional.pad(self._project_back(out), (0, 0, 0, num_rows - num_tokens))

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of latent rows, the tokens' rows, and the compressed queries after their norm."""
        q_c, rows = self.fused_qkv_a_proj(x)[0].split(self._sizes, dim=-1)
        q_c, rows = self.q_a_layernorm(q_c.contiguous()), self.kv_a_layernorm(rows.contiguous())
        query = self.q_b_proj(q_c)[0].view(-1, self._heads, self._key)
        latent = torch.bmm(query.transpose(0, 1), self._up_projections()[0])
        return latent.transpose(0, 1).contiguous(), rows, q_c

    def _project_back(self, out: torch.Tensor) -> torch.Tensor:
        """out: [num_tokens, heads, size of a row]"""
        values = torch.bmm(out.transpose(0, 1), self._up_projections()[1].transpose(1, 2))
        result: torch.Tensor = self.o_proj(values.transpose(0, 1).reshape(len(out), -1))[0]
        return result

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The up-projections of keys and of values: [heads, entries, size of a row] each."""
        joint = self.kv_b_proj.weight.view(self._heads, self._key + self._value, -1)
        return joint[:, : self._key], joint[:, self._key :]

    def _profile(self, x: torch.Tensor) -> torch.Tensor:
        """Computes all products of a step, and allocates the memory of its attention."""
        query, _, q_c = self._project(x)
        self.indexer.keys.project(x)
        self.indexer.project(x, q_c)
        self.rows.take_most_memory(query)
        return self._project_back(query)
