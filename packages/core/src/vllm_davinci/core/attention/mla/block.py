"""The attention block of vLLM's DeepSeek models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization import QuantizationConfig

from vllm_davinci.core.attention.mla.adapters import StepAdapters, UpProjectionAdapters
from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.attention.mla.sparse_layer import NPUSparseMLAAttention
from vllm_davinci.core.attention.mla.sparse_metadata import SparseMLAMetadata
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import prepare_weight
from vllm_davinci.core.layers.prefetch import prefetch
from vllm_davinci.core.layers.quantized_activation import map_rows


class NPUMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """The attention block of vLLM's DeepSeek models: NPUMLAAttention and the output projection."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        skip_topk: bool = False,
        non_causal_multi_token_decode: bool = False,
        allow_short_prefill_indexer_scoring_skip: bool = False,
        fuse_qkv_rmsnorm: bool = False,  # vLLM's choice; made here instead
    ) -> None:
        # vLLM's own constructor would make its attention layer, for other devices.
        nn.Module.__init__(self)
        _refuse_unserved(mla_modules, prefix, q_lora_rank, non_causal_multi_token_decode)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.prefix = prefix
        self.fused_qkv_a_proj = mla_modules.fused_qkv_a_proj
        if self.fused_qkv_a_proj is not None:
            prepare_weight(self.fused_qkv_a_proj)
        self.kv_a_proj_with_mqa = mla_modules.kv_a_proj_with_mqa
        self.q_a_layernorm = mla_modules.q_a_layernorm
        self.q_b_proj = mla_modules.q_b_proj
        self.q_proj = mla_modules.q_proj
        self.kv_a_layernorm = mla_modules.kv_a_layernorm
        self.kv_b_proj = mla_modules.kv_b_proj
        self.rotary_emb = mla_modules.rotary_emb
        self.o_proj = mla_modules.o_proj
        make = NPUSparseMLAAttention if mla_modules.is_sparse else NPUMLAAttention
        self.mla_attn: Any = make(
            num_heads,
            scale,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            q_lora_rank,
            kv_lora_rank,
            modules=mla_modules,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """positions: [num_tokens], int64; hidden_states: [num_tokens, hidden_size], also returned.

        Rows after the step's real tokens are padding. Runs on the current stream.
        """
        if llama_4_scaling is not None:
            raise UnsupportedFeatureError(
                f"{self.prefix} scales its queries by position (llama_4_scaling), which "
                f"{RELEASE} cannot compute. Choose another model."
            )
        attention, metadata = self.mla_attn, self.mla_attn.step_metadata
        if metadata is None:
            return self._without_batch(hidden_states, attention.project)
        num_tokens = metadata.num_actual_tokens
        if not attention.is_sparse and metadata.all_ranks is not None:
            return self._in_divided_prefills(positions, hidden_states, metadata)
        tokens = _without_padding(hidden_states, num_tokens)
        if attention.is_sparse:
            out = attention.attend_to_chosen(positions[:num_tokens], tokens, metadata)
            out = self.gated(out, tokens)
        else:
            cache = attention.bound_cache
            stage = attention.preprocess(positions[:num_tokens], tokens, cache, metadata)
            out = attention.attend(stage, metadata)
        return self._output(out, metadata, hidden_states.shape[0])

    def gated(self, out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gates the output of sparse attention before its projection, in models that do so.

        out: [num_tokens, num_heads * v_head_dim]; hidden_states: [num_tokens, hidden_size]
        """
        return out

    def _in_divided_prefills(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, metadata: NPUMLAMetadata
    ) -> torch.Tensor:
        """`forward` if ranks divide prefills; this rank may have no token of a short prefill."""
        attention: NPUMLAAttention = self.mla_attn
        stage = attention.preprocess(positions, hidden_states, attention.bound_cache, metadata)
        if metadata.num_actual_tokens:
            out = attention.attend(stage, metadata)
        else:
            size = self.num_heads * self.v_head_dim
            out = torch.empty(0, size, dtype=stage.q_pe.dtype, device=stage.q_pe.device)
        return self._output(out, metadata, hidden_states.shape[0])

    def compress(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Both down-projections, W_DQ and W_DKV, which every rank holds whole.

        hidden_states: [num_tokens, hidden_size]
        Returns [num_tokens, q_lora_rank + kv_lora_rank + qk_rope_head_dim].
        """
        return self.mla_attn.preprocess.compress(hidden_states)

    def forward_compressed(
        self, positions: torch.Tensor, compressed: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`forward` for the output of `compress`, which may have run on another rank.

        positions: [num_tokens], int64; compressed: [num_tokens, q_lora_rank + kv_lora_rank +
        qk_rope_head_dim]; gate: [num_tokens, num_heads * v_head_dim], whose sigmoid is a factor of
        attention's output. Returns [num_tokens, hidden_size].
        """
        metadata = self.mla_attn.step_metadata
        preprocess = self.mla_attn.preprocess
        if metadata is None:
            return self._without_batch(compressed, preprocess.decompress)
        num_tokens = metadata.num_actual_tokens
        q, kv = preprocess.decompress(compressed[:num_tokens])
        stage = preprocess.after_projections(
            positions[:num_tokens], q, kv, self.mla_attn.bound_cache, metadata
        )
        out = self.mla_attn.attend(stage, metadata)
        if gate is not None:
            out = out * gate[:num_tokens].sigmoid()
        return self._output(out, metadata, compressed.shape[0])

    def take_adapters(self, step: StepAdapters, up_projection: UpProjectionAdapters | None) -> None:
        """Switches to this block's wrapped (LoRA) projections.

        step:          adapters of the rows
        up_projection: deltas of kv_b_proj, which no stage calls as a layer; None without any
        """
        preprocess = self.mla_attn.preprocess
        names = ("fused_qkv_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "q_proj")
        wrapped = {name: getattr(self, name) for name in names}
        preprocess.modules = replace(preprocess.modules, **wrapped)
        preprocess.adapters = step
        self.mla_attn.impl.adapters = up_projection

    def _output(
        self, out: torch.Tensor, metadata: NPUMLAMetadata | SparseMLAMetadata, num_rows: int
    ) -> torch.Tensor:
        """Output projection of `num_rows` rows: attention's result `out`, then padding."""
        ahead = self.mla_attn.weight_prefetch
        if ahead is not None and ahead.is_on(metadata.num_actual_tokens):
            ahead.begin()
        elif self.mla_attn.preprocess.scheduler_of(metadata) is not None:
            prefetch(self.o_proj.weight)
        if num_padding := num_rows - metadata.num_actual_tokens:
            out = torch.cat([out, out.new_zeros(num_padding, out.shape[1])])
        return self.o_proj(out)[0]

    def _without_batch(
        self, rows: torch.Tensor, project: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        """The layer's output in a profile run or an idle step, which have no cache.

        rows:    input of `project`, [num_tokens, ...]
        project: the stage before attention
        """
        num_tokens = rows.shape[0]
        # Not rows.new_zeros: rows of type QuantizedActivation have no such method.
        dtype, device = rows.dtype, rows.device
        if self.mla_attn.kv_cache is None:
            # In a profile run, take the memory of the largest prefill, so that vLLM counts it.
            project(rows)
            torch.empty(self.mla_attn.elements_of_step(num_tokens), dtype=dtype, device=device)
            if self.mla_attn.is_sparse:
                self.mla_attn.take_most_memory(num_tokens)
        out_size = self.num_heads * self.v_head_dim
        return self.o_proj(torch.zeros(num_tokens, out_size, dtype=dtype, device=device))[0]


def _refuse_unserved(
    modules: MLAModules, prefix: str, q_lora_rank: int | None, is_non_causal: bool
) -> None:
    rotary_emb = modules.rotary_emb
    refused = {
        "sparse attention without compressed queries (q_lora_rank)": (
            modules.is_sparse and q_lora_rank is None
        ),
        "a gate on the attention's output (g_proj)": modules.g_proj is not None,
        "non-causal decodes of several tokens": is_non_causal,
        "sparse attention without rotary embedding": modules.is_sparse and rotary_emb is None,
        "rotary embedding of halves (is_neox_style)": getattr(rotary_emb, "is_neox_style", False),
    }
    if named := [what for what, is_asked in refused.items() if is_asked]:
        raise UnsupportedFeatureError(
            f"{prefix} needs {', '.join(named)}, which {RELEASE} cannot compute "
            "in MLA. Choose another model."
        )


def _without_padding(rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return rows if rows.shape[0] == num_tokens else map_rows(rows, lambda each: each[:num_tokens])
