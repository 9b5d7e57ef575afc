"""The stage before MLA: computes queries and cache rows from hidden states.

On two streams, in steps with decodes only:

    side:          | W_DKV           | write kv   |        | q_pe |
    main:  | W_DQ  | q-norm, cos/sin | W_UQ       | split  | W_UK | attention | W_UV | W_O

The weights of W_DQ and W_O are fetched into the cache before their inputs are ready.

Matrix products run one at a time; norms, rotations and the cache write overlap with them. A fused
operator follows the same order on the two streams. Without one, int8 W_DQ and W_DKV stay one
product, which is bit-identical.
"""

from typing import Any, NamedTuple

import torch
import torch_npu
from vllm.distributed.parallel_state import get_pcp_group
from vllm.model_executor.layers.mla import MLAModules

from vllm_davinci.core.attention.mla.adapters import StepAdapters
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.impl import NPUMLAImpl
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.attention.mla.projections import Projections, fusible_projections
from vllm_davinci.core.attention.mla.sparse_metadata import SparseMLAMetadata
from vllm_davinci.core.attention.mla.step_rope import StepRope
from vllm_davinci.core.components.protocols import Fork, StreamScheduler
from vllm_davinci.core.layers.linear import plain_weight
from vllm_davinci.core.layers.prefetch import WeightPrefetch, prefetch

SIDE = "vector"


class Preprocessed(NamedTuple):
    """Inputs of a step's attention; the cache already holds its tokens' kv_c and k_pe.
    ~
    """

    ql_nope: torch.Tensor | None
    q_pe: torch.Tensor
    q_nope: torch.Tensor | None
    kv_c_normed: torch.Tensor | None
    k_pe: torch.Tensor | None


class MLAPreprocess:
    """The stage of one layer, fused or composed.

    scheduler: runs the key-value path and the rotation of queries on a side stream; None without
               one
    """

    adapters: StepAdapters | None = None  # adapters of projections, if any

    def __init__(
        self,
        impl: NPUMLAImpl,
        modules: MLAModules,
        q_lora_rank: int | None,
        qk_rope_head_dim: int,
        scheduler: StreamScheduler | None,
    ) -> None:
        self.impl = impl
        self.modules: Any = modules
        self.q_lora_rank = q_lora_rank
        self.head_dims = [impl.qk_nope_head_dim, qk_rope_head_dim]
        self.fetched_by: WeightPrefetch | None = (
            None  # from the previous layer: prefetches this layer's weights
        )
        self._scheduler = scheduler
        self._fusible: Projections | None = None
        self._down: tuple[torch.Tensor, ...] = ()  # W_DQ and W_DKV, if they are two products

    def process_weights_after_loading(self) -> None:
        """Finds the weights, as views, of a fused operator and of the two-stream stage."""
        self._fusible = fusible_projections(self.modules)
        if self.q_lora_rank is not None:
            weight = plain_weight(self.modules.fused_qkv_a_proj)
            # A quantized layer has one scale for both parts.
            self._down = () if weight is None else weight.tensor_split([self.q_lora_rank], dim=1)

    def scheduler_of(self, metadata: NPUMLAMetadata) -> StreamScheduler | None:
        """The scheduler if the step decodes on every DP rank, for two streams; otherwise None."""
        return self._scheduler if metadata.is_decode_everywhere else None

    def __call__(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        cache: MLACache,
        metadata: NPUMLAMetadata,
    ) -> Preprocessed:
        """Runs on the current stream, which waits for the side stream's work. Writes to the cache.

        positions:     [num_actual_tokens], int64
        hidden_states: [num_actual_tokens, hidden_size]
        """
        if metadata.all_ranks is not None:
            return self._of_divided_prefills(positions, hidden_states, cache, metadata)
        scheduler = self.scheduler_of(metadata)
        if scheduler is None:
            fused = self._fused(positions, hidden_states, cache, metadata, None)
            if fused is not None:
                return fused
            return self.after_projections(positions, *self.project(hidden_states), cache, metadata)
        ahead = self.fetched_by
        is_there = ahead is not None and ahead.fetches(metadata.num_actual_tokens)
        if self.q_lora_rank is not None and not is_there:
            prefetch(self.modules.fused_qkv_a_proj.weight)
        with scheduler.fork(SIDE) as fork:
            fused = self._fused(positions, hidden_states, cache, metadata, fork.stream)
            if fused is not None:
                return fused
            return self._on_two_streams(positions, hidden_states, cache, metadata, fork)

    def _fused(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        cache: MLACache,
        metadata: NPUMLAMetadata,
        side_stream: torch.Stream | None,
    ) -> Preprocessed | None:
        """The stage in one call, or None if it must be composed."""
        projections = self._fusible
        if projections is None or not projections.is_fused or self._has_adapters:
            return None
        cos, sin = self.cos_sin(positions, hidden_states, metadata)
        norm = self.modules.kv_a_layernorm
        num_decode_tokens = metadata.num_decode_tokens
        ql_nope, q_pe, q, kv_c_normed, k_pe = projections.preprocess(
            hidden_states,
            {
                "kv_a_norm": norm.weight,
                "W_UK": self.impl.W_UK,
                "cos": cos,
                "sin": sin,
                "slot_mapping": metadata.slot_mapping,
                "kv_c_cache": cache.kv_c,
                "k_pe_cache": cache.k_pe,
                "kv_epsilon": norm.variance_epsilon,
                "num_decode_tokens": num_decode_tokens,
                "side_stream": side_stream,
            },
        )
        if q is None or kv_c_normed is None or k_pe is None:  # a step without prefills
            return Preprocessed(ql_nope, q_pe, None, None, None)
        return Preprocessed(
            ql_nope,
            q_pe,
            q[num_decode_tokens:, :, : self.impl.qk_nope_head_dim],
            kv_c_normed[num_decode_tokens:],
            k_pe[num_decode_tokens:],
        )

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and compressed keys and values, before rotation and key-value norm.

        Returns [num_tokens, num_heads, qk_head_dim] and [num_tokens, kv_lora_rank +
        qk_rope_head_dim], the latter perhaps strided.
        """
        if self.q_lora_rank is not None:
            return self.decompress(self.compress(hidden_states))
        q = self.modules.q_proj(hidden_states)[0]
        return self.heads(q), self.modules.kv_a_proj_with_mqa(hidden_states)[0]

    def compress(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Both down-projections, W_DQ and W_DKV, which every rank holds whole.

        hidden_states: [num_tokens, hidden_size]
        Returns [num_tokens, q_lora_rank + kv_lora_rank + qk_rope_head_dim].
        """
        compressed: torch.Tensor = self.modules.fused_qkv_a_proj(hidden_states)[0]
        return compressed

    def decompress(self, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `project`, from the result of `compress`."""
        q = self.modules.q_a_layernorm(compressed[:, : self.q_lora_rank])
        return self.heads(self.modules.q_b_proj(q)[0]), compressed[:, self.q_lora_rank :]

    def after_projections(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: MLACache,
        metadata: NPUMLAMetadata,
    ) -> Preprocessed:
        """Rotates, normalizes, writes to the cache and absorbs the results of `project`."""
        q_nope, q_pe = q.split(self.head_dims, dim=-1)
        cos, sin = self.cos_sin(positions, q, metadata)
        kv_c_normed, k_pe = self.write_cache(kv, cos, sin, cache, metadata)
        q_pe = torch_npu.npu_interleave_rope(q_pe.unsqueeze(2), cos, sin).squeeze(2)
        num_decode_tokens = metadata.num_decode_tokens
        return Preprocessed(
            self.impl.absorb(q_nope[:num_decode_tokens]) if num_decode_tokens else None,
            q_pe,
            q_nope[num_decode_tokens:],
            kv_c_normed[num_decode_tokens:],
            k_pe[num_decode_tokens:],
        )

    def _of_divided_prefills(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        cache: MLACache,
        metadata: NPUMLAMetadata,
    ) -> Preprocessed:
        """The stage if ranks divide prefills: each writes the rows of all ranks to its cache.

        positions, hidden_states: with padding, so that all ranks have equally many rows
        """
        gathered, ranks = metadata.all_ranks, get_pcp_group()
        assert gathered is not None
        if gathered.positions is None:
            gathered.positions = ranks.all_gather(positions, dim=0)
        q, kv = self.project(hidden_states)
        rows = ranks.all_gather(kv.contiguous(), dim=0)
        cos, sin = self.cos_sin(gathered.positions, rows, gathered)
        kv_c_normed, k_pe = self._write_rows(
            rows, cos, sin, cache, gathered.slot_mapping, is_output_kv=True
        )
        first, num_decode_tokens = ranks.rank_in_group * len(positions), metadata.num_decode_tokens
        own = slice(first + num_decode_tokens, first + metadata.num_actual_tokens)
        num_tokens = metadata.num_actual_tokens
        q_nope, q_pe = q[:num_tokens].split(self.head_dims, dim=-1)
        if num_tokens:
            cos, sin = self.cos_sin(positions[:num_tokens], q, metadata)
            q_pe = torch_npu.npu_interleave_rope(q_pe.unsqueeze(2), cos, sin).squeeze(2)
        return Preprocessed(
            self.impl.absorb(q_nope[:num_decode_tokens]) if num_decode_tokens else None,
            q_pe,
            q_nope[num_decode_tokens:],
            kv_c_normed[own],
            k_pe[own],
        )

    def _on_two_streams(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        cache: MLACache,
        metadata: NPUMLAMetadata,
        fork: Fork,
    ) -> Preprocessed:
        queries, kv = self._compress_on_two_streams(hidden_states, fork)
        cos, sin = self.cos_sin(positions, hidden_states, metadata)
        project = self.modules.q_proj
        if self.q_lora_rank is not None:
            queries, project = self.modules.q_a_layernorm(queries), self.modules.q_b_proj
        fork.join()  # the queries' product waits for W_DKV: two concurrent products would contend

        def write_cache(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
            self.write_cache(kv, cos, sin, cache, metadata)

        fork.run(write_cache, kv, cos, sin)
        q_nope, q_pe = self.heads(project(queries)[0]).split(self.head_dims, dim=-1)
        rotated = fork.run(torch_npu.npu_interleave_rope, q_pe.unsqueeze(2), cos, sin)
        ql_nope = self.impl.absorb(q_nope)
        return Preprocessed(ql_nope, rotated.squeeze(2), None, None, None)

    def _compress_on_two_streams(
        self, hidden_states: torch.Tensor, fork: Fork
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the queries' up-projection input, before its norm, and `write_cache`'s input."""
        if self.q_lora_rank is None:
            project = self.modules.kv_a_proj_with_mqa
            return hidden_states, fork.run(lambda x: project(x)[0], hidden_states)
        if not self._down or self._has_adapters:
            queries, kv = self.compress(hidden_states).tensor_split([self.q_lora_rank], dim=1)
            return queries, kv
        down_q, down_kv = self._down
        queries = torch.mm(hidden_states, down_q)
        return queries, fork.run(torch.mm, hidden_states, down_kv)

    @property
    def _has_adapters(self) -> bool:
        """True if adapters are added to the step's projections."""
        return self.adapters is not None and not self.adapters.no_lora

    def heads(self, q: torch.Tensor) -> torch.Tensor:
        return q.view(-1, self.impl.num_heads, sum(self.head_dims))

    def cos_sin(
        self, positions: torch.Tensor, rows: torch.Tensor, metadata: StepRope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.modules.rotary_emb is None:
            return metadata.no_rotation(positions.shape[0], self.head_dims[1], rows)
        table = self.modules.rotary_emb._match_cos_sin_cache_dtype(rows)
        return metadata.cos_sin(table, positions)

    def write_cache(
        self,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: MLACache,
        metadata: NPUMLAMetadata | SparseMLAMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalizes kv_c, rotates k_pe and writes both to the cache, in one launch.

        Leaves out the norm's bias: attention adds its effect to the values (NPUMLAImpl).

        kv:       [num_tokens, kv_lora_rank + qk_rope_head_dim]
        cos, sin: [num_tokens, 1, 1, qk_rope_head_dim]
        Returns the written rows, kv_c and k_pe, which are filled only if the step has prefills.
        """
        return self._write_rows(
            kv, cos, sin, cache, metadata.slot_mapping, metadata.prefill is not None
        )

    def _write_rows(
        self,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: MLACache,
        slot_mapping: torch.Tensor,
        is_output_kv: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self.modules.kv_a_layernorm
        _, _, k_pe, kv_c_normed = torch_npu.npu_kv_rmsnorm_rope_cache(
            kv[:, None, None, :],
            norm.weight,
            cos,
            sin,
            slot_mapping,
            cache.k_pe,
            cache.kv_c,
            epsilon=norm.variance_epsilon,
            cache_mode="PA_BNSD",
            is_output_kv=is_output_kv,
        )
        return kv_c_normed.flatten(1), k_pe.flatten(1)
