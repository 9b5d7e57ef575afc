"""Attention of Qwen3.8-Flash-Next: gated heads, to the tokens of chosen groups."""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import (
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_davinci.core.attention.compressed.compressor import MeanKeys
from vllm_davinci.core.attention.compressed.pooled import PooledAttention
from vllm_davinci.core.attention.compressed.row_indexer import key_page_rows
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens, Tokens
from vllm_davinci.core.attention.compressed.token_rows import TokenRows
from vllm_davinci.core.layers.quantized_activation import map_rows


class GroupIndexer(nn.Module):
    """Queries, and keys that are means of groups, with which a layer chooses groups of tokens.

    history: gives rotary positions of groups' first tokens; None if they are token numbers
    """

    def __init__(
        self, config: Any, vllm_config: VllmConfig, history: TokenRows | None, prefix: str
    ) -> None:
        super().__init__()
        self.num_heads, self._size = config.indexer_n_heads, config.indexer_head_dim
        self._sizes = [self.num_heads * self._size, self._size]
        self.index_qk_proj = ReplicatedLinear(
            config.hidden_size,
            sum(self._sizes),
            bias=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.index_qk_proj",
        )
        self.q_layernorm, k_layernorm = (
            GemmaRMSNorm(self._size, config.rms_norm_eps) for _ in range(2)
        )
        rope = dict(config.rope_parameters)
        rotated = config.head_dim * rope.get("partial_rotary_factor", 1.0)
        rope["partial_rotary_factor"] = rotated / self._size
        self._rope = get_rope(
            self._size, max_position=config.max_position_embeddings, rope_parameters=rope
        )
        self._last_position = config.max_position_embeddings - 1
        self._history = (history,)  # registered by the model
        self.keys = MeanKeys(
            config.indexer_compress_ratio,
            self._size,
            norm=k_layernorm,
            rotate=self._rotate_keys,
            dtype=vllm_config.model_config.dtype,
            prefix=f"{prefix}.keys",
            page_rows=key_page_rows(self.num_heads, self._size),
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries before their norm, and keys: [num_tokens, ..] each."""
        query, key = self.index_qk_proj(x)[0].split(self._sizes, dim=-1)
        return query, key.contiguous()

    def choosing(
        self, query: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries [num_tokens, heads, size], and weights [num_tokens, heads] in fp32."""
        normed = self.q_layernorm(query.reshape(-1, self._size)).view(query.shape)
        rotated = self._rope(positions, normed, normed[:, : self._size].contiguous())[0]
        shaped = rotated.view(len(query), self.num_heads, self._size)
        scale = float(self._size**-0.5)
        return shaped, shaped.new_full(shaped.shape[:2], scale, dtype=torch.float32)

    def _rotate_keys(self, rows: torch.Tensor, first: Tokens) -> torch.Tensor:
        history = self._history[0]
        positions = first.positions
        if history is not None:
            # A graph's padding reads the null block, which has rows of other kinds.
            positions = history.rope_positions(first).clamp(min=0, max=self._last_position)
        rotated: torch.Tensor = self._rope(positions.contiguous(), rows, rows.clone())[0]
        return rotated


class Qwen4ExpAttention(nn.Module):
    """Grouped-query attention with a gate of each output. Heads are divided among ranks; indexers
    are not."""

    def __init__(
        self, config: Any, vllm_config: VllmConfig, history: TokenRows | None, prefix: str
    ) -> None:
        super().__init__()
        quant, ranks = vllm_config.quant_config, get_tensor_model_parallel_world_size()
        heads, kv_heads, self._size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        own_kv = max(1, kv_heads // ranks)
        self._sizes = [heads // ranks * 2 * self._size, own_kv * self._size, own_kv * self._size]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self._size,
            2 * heads,  # a head's gates follow its query
            kv_heads,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * self._size,
            config.hidden_size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm, self.k_norm = (GemmaRMSNorm(self._size, config.rms_norm_eps) for _ in range(2))
        self.rotary_emb = get_rope(
            self._size,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        self.indexer = GroupIndexer(config, vllm_config, history, f"{prefix}.indexer")
        most = min(config.indexer_budget, vllm_config.model_config.max_model_len)
        self.rows = PooledAttention(
            size=2 * own_kv * self._size,
            dtype=vllm_config.model_config.dtype,
            scale=float(self._size**-0.5),
            keys=self.indexer.keys,
            num_chosen=most // config.indexer_compress_ratio,
            num_kv_heads=own_kv,
            prefix=prefix,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, step: StepTokens | None
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size]; positions: [num_tokens] or [3, num_tokens], int64

        step: None in a profile run. Returns a tensor like x; zero in rows of padding.
        """
        num_rows = x.shape[0]
        num_tokens = num_rows if step is None else step.num_tokens
        x = map_rows(x, lambda rows: rows[:num_tokens])
        positions = positions[..., :num_tokens]
        both, key, value = self.qkv_proj(x)[0].split(self._sizes, dim=-1)
        query, gate = both.unflatten(1, (-1, 2, self._size)).unbind(2)
        query, key = self._normed(self.q_norm, query), self._normed(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        shaped = query.view(num_tokens, -1, self._size)
        index_q, index_k = self.indexer.project(x)
        index = self.indexer.choosing(index_q, positions)
        if step is None:
            self.rows.take_most_memory(shaped)
            out = shaped
        else:
            self.indexer.keys.write_rows(index_k, step)
            out = self.rows.attend(shaped, torch.cat([key, value], dim=-1), step, index)
        out = (out * gate.sigmoid()).flatten(1)
        return nn.functional.pad(self.o_proj(out)[0], (0, 0, 0, num_rows - num_tokens))

    def _normed(self, norm: GemmaRMSNorm, heads: torch.Tensor) -> torch.Tensor:
        """Normalizes each head. Returns [num_tokens, num_heads * head_size]."""
        normed: torch.Tensor = norm(heads.reshape(-1, self._size))
        return normed.view(len(heads), -1)
