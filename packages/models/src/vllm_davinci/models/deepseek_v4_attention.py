"""Attention of DeepSeek-V4: a row is key and value of all heads; some rows stand for groups.

A layer's queries see the last tokens uncompressed; in most layers they also see compressed rows:
all rows of groups of 128 tokens, or rows of groups of 4 that an indexer chooses.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.transformers_utils.deepseek_v4_utils import get_compress_ratios

from vllm_davinci.core.attention.compressed.compressor import OVERLAPPING, Compressor
from vllm_davinci.core.attention.compressed.layer import CompressedAttention
from vllm_davinci.core.attention.compressed.quantized_rows import QuantizedRows
from vllm_davinci.core.attention.compressed.rope import CosSin, RopeTable, inverse_frequencies
from vllm_davinci.core.attention.compressed.row_indexer import RowChoice, key_page_rows
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.layers.quantized_activation import map_rows


class RowIndexer(nn.Module):
    """Queries, weights and keys with which a layer chooses among its compressed rows."""

    def __init__(self, vllm_config: VllmConfig, rope: RopeTable, prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        self._heads, self._size = config.index_n_heads, config.index_head_dim
        self._scale = float(self._heads**-0.5 * self._size**-0.5)
        self._rope = rope
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self._heads * self._size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.wq_b",
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size,
            self._heads,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.weights_proj",
        )
        self.compressor = make_compressor(
            vllm_config,
            OVERLAPPING,
            self._size,
            rope,
            f"{prefix}.compressor",
            key_page_rows(self._heads, self._size),
            vllm_config.attention_config.indexer_kv_dtype == "int8",
        )

    def project(
        self, x: torch.Tensor, q_c: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size]; q_c: [num_tokens, q_lora_rank], after its norm

        Returns rotated queries [num_tokens, heads, size], and weights [num_tokens, heads] in fp32.
        """
        query = self.wq_b(q_c)[0].view(-1, self._heads, self._size)
        query, cache = self._rope.rotate(query, cos_sin), self.compressor.cache
        if isinstance(cache, QuantizedRows):
            query = cache.rotated(query)
        return query, self.weights_proj(x)[0].float() * self._scale


class DeepseekV4Attention(nn.Module):
    """Attention of one layer. Heads are divided among tensor-parallel ranks, rows are not.

    ropes: the tables of layers without and with compressed rows
    block: as in `CompressedAttention`
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        layer: int,
        ropes: dict[bool, RopeTable],
        prefix: str,
        block: int = 0,
    ) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        dtype = vllm_config.model_config.dtype
        self._size, self._eps = config.head_dim, config.rms_norm_eps
        self._sizes = [config.q_lora_rank, self._size]
        ratio = 0 if block else compress_ratio(config, layer)
        self._rope = ropes[ratio > 1]
        ranks = get_tensor_model_parallel_world_size()
        heads, groups = config.num_attention_heads, config.o_groups
        self._heads, self._groups = heads // ranks, groups // ranks
        self.fused_wqa_wkv = MergedColumnParallelLinear(
            config.hidden_size,
            self._sizes,
            bias=False,
            quant_config=quant,
            disable_tp=True,
            prefix=f"{prefix}.fused_wqa_wkv",
        )
        self.q_norm = RMSNorm(config.q_lora_rank, self._eps)
        self.kv_norm = RMSNorm(self._size, self._eps)
        self.head_norm = RMSNorm(self._size, self._eps, has_weight=False)
        self.wq_b = ColumnParallelLinear(
            config.q_lora_rank,
            heads * self._size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.wq_b",
        )
        self.wo_a = ColumnParallelLinear(
            heads * self._size // groups,
            groups * config.o_lora_rank,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.wo_a",
        )
        self.wo_b = RowParallelLinear(
            groups * config.o_lora_rank,
            config.hidden_size,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.wo_b",
        )
        sinks = torch.empty(self._heads, dtype=torch.float32)
        self.attn_sink = nn.Parameter(sinks, requires_grad=False)
        set_weight_attrs(self.attn_sink, {"weight_loader": _load_own_heads})
        self.compressor: Compressor | None = None
        self.indexer: RowIndexer | None = None
        choice, most = None, 0
        if ratio > 1:
            name, rope = f"{prefix}.compressor", self._rope
            self.compressor = make_compressor(vllm_config, ratio, self._size, rope, name)
            most = vllm_config.model_config.max_model_len // ratio
        if ratio == OVERLAPPING:
            self.indexer = RowIndexer(vllm_config, self._rope, f"{prefix}.indexer")
            choice = RowChoice(self.indexer.compressor, config.index_topk)
            most = min(most, config.index_topk)
        self.rows = CompressedAttention(
            size=self._size,
            dtype=dtype,
            window=config.sliding_window,
            compressor=self.compressor,
            choice=choice,
            most_rows=most,
            prefix=prefix,
            block=block,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, step: StepTokens | None
    ) -> torch.Tensor:
        """positions: [num_tokens], int64; x: [num_tokens, hidden_size]

        step: None in a profile run. Returns [num_tokens, hidden_size]; zero in rows of padding.
        """
        if step is None:
            return self._project_back(self._profile(positions, x), self._rope.at(positions))
        num_rows, num_tokens = x.shape[0], step.num_tokens
        x, positions = map_rows(x, lambda rows: rows[:num_tokens]), positions[:num_tokens]
        cos_sin = self._rope.at(positions)
        query, rows, q_c = self._project(x, cos_sin)
        index = None
        if self.compressor is not None:
            self.compressor.write_rows(x, step)
        if self.indexer is not None:
            self.indexer.compressor.write_rows(x, step)
            index = self.indexer.project(x, q_c, cos_sin)
        out = self.rows.attend(query, rows, self.attn_sink, step, index)
        result = self._project_back(out, cos_sin)
        return nn.functional.pad(result, (0, 0, 0, num_rows - num_tokens))

    def write_context(self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores the rows of tokens without queries.

        x: [num_tokens, hidden_size]; positions: [num_tokens], int64; slots: see `write_at`
        """
        rows = self.kv_norm(self.fused_wqa_wkv(x)[0].split(self._sizes, dim=-1)[1].contiguous())
        rotated = self._rope.rotate(rows.unsqueeze(1), self._rope.at(positions)).squeeze(1)
        self.rows.window.write_at(slots, rotated)

    def _project(
        self, x: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and rows, and the compressed queries after their norm."""
        q_c, rows = self.fused_wqa_wkv(x)[0].split(self._sizes, dim=-1)
        q_c, rows = self.q_norm(q_c.contiguous()), self.kv_norm(rows.contiguous())
        query = self.wq_b(q_c)[0].view(-1, self._heads, self._size)
        query = self._rope.rotate(self.head_norm(query), cos_sin)
        return query, self._rope.rotate(rows.unsqueeze(1), cos_sin).squeeze(1), q_c

    def _project_back(self, out: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Projects the output. out: [num_tokens, heads, size], rotated back by its positions"""
        turned = self._rope.rotate(out, cos_sin.backwards())
        grouped = turned.reshape(len(out), self._groups, -1).transpose(0, 1)
        weight = self.wo_a.weight.view(self._groups, -1, grouped.shape[-1])
        narrow = torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1)
        result: torch.Tensor = self.wo_b(narrow.reshape(len(out), -1))[0]
        return result

    def _profile(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Computes all products of a step, and allocates the memory of its attention."""
        cos_sin = self._rope.at(positions)
        query, _, q_c = self._project(x, cos_sin)
        if self.compressor is not None:
            self.compressor.project(x)
        if self.indexer is not None:
            self.indexer.compressor.project(x)
            self.indexer.project(x, q_c, cos_sin)
        self.rows.take_most_memory(query)
        return query


def compress_ratio(config: Any, layer: int) -> int:
    """Tokens of a layer's compressed rows; 0 or 1 without such rows.

    config: as released, or with transformers' names, which it also gets from released ones
    layer:  may be one of multi-token prediction, after the model's last
    """
    return int(get_compress_ratios(config)[layer])


def rope_tables(config: Any, num_positions: int) -> dict[bool, RopeTable]:
    """Tables of layers without and with compressed rows; only the latter use YaRN's scaling."""
    size, scaling = config.qk_rope_head_dim, config.rope_parameters
    if scaling is not None and isinstance(scaling.get("compress"), dict):
        scaling = scaling["compress"]
    plain = inverse_frequencies(config.rope_theta, size, None)
    scaled = inverse_frequencies(config.compress_rope_theta, size, scaling)
    return {False: RopeTable(plain, num_positions), True: RopeTable(scaled, num_positions)}


def make_compressor(
    vllm_config: VllmConfig,
    ratio: int,
    size: int,
    rope: RopeTable,
    prefix: str,
    page_rows: int | None = 1,
    quantizes: bool = False,
) -> Compressor:
    """A compressor with this platform's projections, which every rank holds whole."""
    config = vllm_config.model_config.hf_config
    features = size * (2 if ratio == OVERLAPPING else 1)
    return Compressor(
        ratio,
        size,
        projection=MergedColumnParallelLinear(
            config.hidden_size,
            [features, features],
            bias=False,
            quant_config=vllm_config.quant_config,
            disable_tp=True,
            prefix=f"{prefix}.fused_wkv_wgate",
        ),
        norm=RMSNorm(size, config.rms_norm_eps),
        rope=rope,
        dtype=vllm_config.model_config.dtype,
        prefix=prefix,
        page_rows=page_rows,
        quantizes=quantizes,
    )


def _load_own_heads(parameter: nn.Parameter, loaded: torch.Tensor) -> None:
    """Loads this rank's heads from a tensor of all heads."""
    own: Any = loaded.chunk(get_tensor_model_parallel_world_size())
    parameter.data.copy_(own[get_tensor_model_parallel_rank()])
