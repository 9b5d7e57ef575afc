"""Sparse MLA in a model (DeepSeek V3.2, GLM-5): attention over chosen tokens only."""

from dataclasses import replace
from typing import Any

import torch
import torch_npu
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.mla import MLAModules
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_davinci.core.attention.gathered import take_most_memory
from vllm_davinci.core.attention.head_sizes import sparse_mla_heads
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.indexer import HEAD_SIZE, MAX_HEADS, TokenIndexer
from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.attention.mla.operator_heads import with_heads
from vllm_davinci.core.attention.mla.sinks import attend_with_sinks
from vllm_davinci.core.attention.mla.sparse_metadata import SparseMLAMetadata
from vllm_davinci.core.errors import UnsupportedFeatureError

# attention_mode of the operator: keys and values are one row, with W_UK in the query.
ABSORBED = 2
# sparse_mode: the last query of a request sees all of its tokens.
CAUSAL = 3


class NPUSparseMLAAttention(NPUMLAAttention):
    """One layer's sparse MLA: W_UK is absorbed into all queries, prefills and decodes alike.

    indexer: chooses tokens; None in a layer that reuses the choice of the nearest indexer before it
    sinks:   a learned score per head, [num_heads] in fp32, in models that have them
    """

    is_sparse = True
    sinks: tuple[torch.Tensor, ...] = ()  # not a parameter here: the model's block holds it

    def __init__(
        self, *sizes: Any, modules: MLAModules, cache_config: CacheConfig | None, prefix: str
    ) -> None:
        super().__init__(*sizes, modules=modules, cache_config=cache_config, prefix=prefix)
        vllm_config = get_current_vllm_config()
        self._max_model_len = vllm_config.model_config.max_model_len
        layers = vllm_config.compilation_config.static_forward_context
        self.indexer: TokenIndexer | None = None
        if modules.indexer is not None:
            _check_indexer(modules.indexer, prefix)
            assert modules.indexer_rotary_emb is not None
            self.indexer = TokenIndexer(modules.indexer, modules.indexer_rotary_emb)
            self.index_head_size = HEAD_SIZE
            # The indexer's keys are part of this layer's cache; vLLM's own layer stores them in
            # another device's format.
            del layers[modules.indexer.k_cache.prefix]
        choosers = [each for each in layers.values() if getattr(each, "indexer", None) is not None]
        if not choosers:
            raise UnsupportedFeatureError(
                f"{prefix} reuses the tokens chosen by an earlier layer, and no earlier layer has "
                "an indexer. Choose another model."
            )
        # Not a submodule: vLLM's module holds its weights.
        self._chooser = (choosers[-1],)

    def _sizes_for_operators(
        self, num_heads: int, nope: int, value: int, vllm_config: VllmConfig
    ) -> tuple[int, tuple[int, int]]:
        heads = sparse_mla_heads(num_heads, self.kv_lora_rank, self.qk_rope_head_dim, self._dtype)
        return heads, (nope, value)  # no keys and values are expanded

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec: Any = super().get_kv_cache_spec(vllm_config)
        return replace(spec, head_size=spec.head_size + self.index_head_size)

    def compressed(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized queries [num_tokens, q_lora_rank]; kv_c and k_pe, before norm and rotation."""
        stage = self.preprocess
        rows = stage.compress(hidden_states)
        return stage.modules.q_a_layernorm(rows[:, : stage.q_lora_rank]), rows[
            :, stage.q_lora_rank :
        ]

    def project(self, hidden_states: torch.Tensor) -> None:
        """Computes all products of a step that has no cache."""
        q_c, _ = self.compressed(hidden_states)
        self.preprocess.modules.q_b_proj(q_c)
        if self.indexer is not None:
            self.indexer.project(hidden_states, q_c)

    def elements_of_step(self, num_tokens: int) -> int:
        impl, rope = self.impl, self.qk_rope_head_dim
        # Queries, rotated and absorbed queries, and the attention output.
        row = 2 * (rope + self.kv_lora_rank)
        attended = impl.num_heads * (impl.qk_nope_head_dim + row)
        if impl.decode_heads > impl.num_heads:
            attended += impl.decode_heads * row
        indexed = 0 if self.indexer is None else self.indexer.elements_per_token
        return num_tokens * max(attended, indexed)

    def take_most_memory(self, num_tokens: int) -> None:
        """Allocates and frees the memory of attention with sinks. For the profile run."""
        if self.sinks:
            chooser: Any = self._chooser[0].indexer
            size = self.kv_lora_rank + self.qk_rope_head_dim
            query = torch.empty(
                num_tokens, self.impl.num_heads, size, dtype=self._dtype, device="npu"
            )
            take_most_memory(query, min(chooser.num_chosen, self._max_model_len))

    def attend_to_chosen(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, metadata: SparseMLAMetadata
    ) -> torch.Tensor:
        """Attention of all tokens; also writes their cache rows.

        positions:     [num_actual_tokens], int64
        hidden_states: [num_actual_tokens, hidden_size]
        Returns [num_actual_tokens, num_heads * v_head_dim].
        """
        impl, cache, stage = self.impl, self.bound_cache, self.preprocess
        q_c, kv = self.compressed(hidden_states)
        if self.indexer is not None:
            keys = self.indexer.project(hidden_states, q_c)
            metadata.chosen = self.indexer.choose(positions, *keys, cache, metadata)
        chosen = self._chooser[0].step_metadata.chosen
        q = stage.heads(stage.modules.q_b_proj(q_c)[0])
        q_nope, q_pe = q.split(stage.head_dims, dim=-1)
        cos, sin = stage.cos_sin(positions, q, metadata)
        stage.write_cache(kv, cos, sin, cache, metadata)
        q_pe = torch_npu.npu_interleave_rope(q_pe.unsqueeze(2), cos, sin).squeeze(2)
        absorbed = impl.absorb(q_nope)
        if self.sinks:
            rows = chosen[..., : self._max_model_len]
            out = attend_with_sinks(
                absorbed, q_pe, cache, metadata, rows, self.sinks[0], impl.scale
            )
        else:
            out = self._attend(absorbed, q_pe, chosen, cache, metadata)
        values: torch.Tensor = torch_npu.npu_transpose_batchmatmul(
            out, impl.W_UV, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        ).flatten(1)
        return values if impl.value_bias is None else values.add_(impl.value_bias)

    def _attend(
        self,
        absorbed: torch.Tensor,
        q_pe: torch.Tensor,
        chosen: torch.Tensor,
        cache: MLACache,
        metadata: SparseMLAMetadata,
    ) -> torch.Tensor:
        """Attends with the fused operator. Returns a new tensor like absorbed, heads strided.

        absorbed: [num_actual_tokens, num_heads, kv_lora_rank]; q_pe: rotated queries
        chosen:   positions in each token's request, [num_actual_tokens, 1, num_chosen]
        """
        num_heads, taken = absorbed.shape[1], self.impl.decode_heads
        out: torch.Tensor = torch_npu.npu_sparse_flash_attention(
            with_heads(absorbed, taken),
            cache.kv_c,
            cache.kv_c,
            chosen,
            self.impl.scale,
            block_table=metadata.block_table,
            actual_seq_lengths_query=metadata.query_ends,
            actual_seq_lengths_kv=metadata.seq_lens,
            query_rope=with_heads(q_pe, taken),
            key_rope=cache.k_pe,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=CAUSAL,
            attention_mode=ABSORBED,
        )[0]
        return out[:, :num_heads]


def _check_indexer(indexer: Any, prefix: str) -> None:
    wrong = {
        f"index_head_dim {indexer.head_dim} (must be {HEAD_SIZE})": indexer.head_dim != HEAD_SIZE,
        f"index_n_heads {indexer.n_head} (must be at most {MAX_HEADS})": indexer.n_head > MAX_HEADS,
    }
    if named := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UnsupportedFeatureError(
            f"{prefix} has {', '.join(named)}, which the NPU's indexer does not take. Choose "
            "another model."
        )
