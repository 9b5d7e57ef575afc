"""The multi-head MLA block: preprocess, attention, output projection."""

from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch import nn
from vllm.config import CacheConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization import QuantizationConfig

from vllm_davinci.core.attention.mla.cache_layer import NPUMLAAttention
from vllm_davinci.core.attention.mla.metadata import CONTEXT_CHUNK_ROWS, NPUMLAMetadata
from vllm_davinci.core.attention.mla.preprocess import Preprocessed, preprocess_at_once
from vllm_davinci.core.attention.mla.streams import PreprocessOnTwoStreams
from vllm_davinci.core.config.side_streams import attention_scheduler
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import prepare_weight
from vllm_davinci.core.layers.prefetch import prefetch
from vllm_davinci.core.layers.quantized_activation import map_rows


class NPUMultiHeadLatentAttention(MultiHeadLatentAttentionWrapper):
    """The block of vLLM's DeepSeek models, on torch_npu's fused operators.

    `preprocess` and `attend` are its two stages. All that a step changes is in the step's
    metadata and in the cache.
    """

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
    ) -> None:
        # vLLM's own constructor would make its attention layer, for other devices.
        nn.Module.__init__(self)
        rotary_emb = mla_modules.rotary_emb
        refused = {
            "sparse attention (index_topk)": mla_modules.is_sparse,
            "a gate on the attention's output (g_proj)": mla_modules.g_proj is not None,
            "non-causal decodes of several tokens": non_causal_multi_token_decode,
            "no rotary embedding": rotary_emb is None,
            "rotary embedding of halves (is_neox_style)": getattr(
                rotary_emb, "is_neox_style", False
            ),
        }
        if named := [what for what, is_asked in refused.items() if is_asked]:
            raise UnsupportedFeatureError(
                f"{prefix} needs {', '.join(named)}, which {RELEASE} cannot compute "
                "in MLA. Choose another model."
            )
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
        self.rotary_emb = rotary_emb
        self.o_proj = mla_modules.o_proj
        scheduler = attention_scheduler(get_current_vllm_config())
        self._on_two_streams = None if scheduler is None else PreprocessOnTwoStreams(scheduler)
        self.mla_attn = NPUMLAAttention(
            num_heads=num_heads,
            scale=scale,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            kv_a_layernorm=mla_modules.kv_a_layernorm,
            kv_b_proj=mla_modules.kv_b_proj,
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
        metadata = self._step_metadata()
        if metadata is None:
            return self._without_batch(hidden_states, self.project)
        num_tokens = metadata.num_actual_tokens
        tokens = _without_padding(hidden_states, num_tokens)
        stage = self.preprocess(positions[:num_tokens], tokens, metadata)
        return self._output(stage, metadata, hidden_states.shape[0])

    def forward_compressed(self, positions: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        """`forward` of hidden states that `compress` has reduced already, on any rank.

        positions: [num_tokens], int64; compressed: [num_tokens, q_lora_rank + kv_lora_rank +
        qk_rope_head_dim]. Returns [num_tokens, hidden_size].
        """
        metadata = self._step_metadata()
        if metadata is None:
            return self._without_batch(compressed, self.decompress)
        num_tokens = metadata.num_actual_tokens
        q, kv = self.decompress(compressed[:num_tokens])
        stage = self.prepare_attention(positions[:num_tokens], q, kv, metadata)
        return self._output(stage, metadata, compressed.shape[0])

    def _step_metadata(self) -> NPUMLAMetadata | None:
        metadata = get_forward_context().attn_metadata
        return metadata[self.mla_attn.layer_name] if isinstance(metadata, dict) else metadata

    def _output(self, stage: Preprocessed, metadata: NPUMLAMetadata, num_rows: int) -> torch.Tensor:
        """Attention and output projection of `num_rows` rows, the last of which may be padding."""
        out = self.attend(stage, metadata)
        if self._on_two_streams is not None and metadata.is_decode_everywhere:
            prefetch(self.o_proj.weight)
        if num_padding := num_rows - metadata.num_actual_tokens:
            out = torch.cat([out, out.new_zeros(num_padding, out.shape[1])])
        return self.o_proj(out)[0]

    def preprocess(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, metadata: NPUMLAMetadata
    ) -> Preprocessed:
        """Query and key-value paths up to attention; writes the tokens' rows to the cache.

        positions:     [num_actual_tokens], int64
        hidden_states: [num_actual_tokens, hidden_size]
        """
        if self._on_two_streams is not None and metadata.is_decode_everywhere:
            return self._on_two_streams(self, positions, hidden_states, metadata)
        at_once = preprocess_at_once(self, positions, hidden_states, metadata)
        if at_once is not None:
            return at_once
        return self.prepare_attention(positions, *self.project(hidden_states), metadata)

    def prepare_attention(
        self, positions: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, metadata: NPUMLAMetadata
    ) -> Preprocessed:
        """Rotation, key-value norm, cache write and absorption of what `project` returns."""
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        table = self.rotary_emb._match_cos_sin_cache_dtype(q)
        cos, sin = metadata.rotary_rows(table, positions)
        latent, k_rope = self.write_cache(kv, cos, sin, metadata)
        q_rope = torch_npu.npu_interleave_rope(q_rope.unsqueeze(2), cos, sin).squeeze(2)
        num_decode_tokens = metadata.num_decode_tokens
        return Preprocessed(
            absorbed=self.mla_attn.impl.absorb(q_nope[:num_decode_tokens])
            if num_decode_tokens
            else None,
            q_rope=q_rope,
            q_nope=q_nope[num_decode_tokens:],
            latent=latent[num_decode_tokens:],
            k_rope=k_rope[num_decode_tokens:],
        )

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and compressed keys and values, before rotation and key-value norm.

        Returns [num_tokens, num_heads, qk_head_dim] and [num_tokens, kv_lora_rank +
        qk_rope_head_dim], the latter perhaps strided.
        """
        if self.q_lora_rank is not None:
            return self.decompress(self.compress(hidden_states))
        q = self.q_proj(hidden_states)[0]
        kv = self.kv_a_proj_with_mqa(hidden_states)[0]
        return q.view(-1, self.num_heads, self.qk_head_dim), kv

    def compress(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Both down-projections, W_DQ and W_DKV, which every rank has whole.

        hidden_states: [num_tokens, hidden_size]
        Returns [num_tokens, q_lora_rank + kv_lora_rank + qk_rope_head_dim].
        """
        return self.fused_qkv_a_proj(hidden_states)[0]

    def decompress(self, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `project` returns, of what `compress` returns."""
        q = self.q_b_proj(self.q_a_layernorm(compressed[:, : self.q_lora_rank]))[0]
        return q.view(-1, self.num_heads, self.qk_head_dim), compressed[:, self.q_lora_rank :]

    def write_cache(
        self,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: NPUMLAMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of the latent part, rotation of the other, both into the cache: one launch.

        The norm's bias is left out: attention adds what it is to values (LatentAttention).

        kv:       [num_tokens, kv_lora_rank + qk_rope_head_dim]
        cos, sin: [num_tokens, 1, 1, qk_rope_head_dim]
        Returns the written rows, latent and rotary, which are filled when the step has prefills.
        """
        cache = self.mla_attn.bound_cache
        _, _, k_rope, latent = torch_npu.npu_kv_rmsnorm_rope_cache(
            kv[:, None, None, :],
            self.kv_a_layernorm.weight,
            cos,
            sin,
            metadata.slot_mapping,
            cache.rotary,
            cache.latent,
            epsilon=self.kv_a_layernorm.variance_epsilon,
            cache_mode="PA_BNSD",
            is_output_kv=metadata.prefill is not None,
        )
        return latent.flatten(1), k_rope.flatten(1)

    def attend(self, stage: Preprocessed, metadata: NPUMLAMetadata) -> torch.Tensor:
        """Attention of all tokens. Returns [num_actual_tokens, num_heads * v_head_dim]."""
        attention, cache = self.mla_attn.impl, self.mla_attn.bound_cache
        parts = []
        num_decode_tokens = metadata.num_decode_tokens
        if metadata.decode is not None:
            q_rope = stage.q_rope[:num_decode_tokens]
            parts.append(attention.decode(stage.absorbed, q_rope, cache, metadata.decode))
        if metadata.prefill is not None:
            q_rope = stage.q_rope[num_decode_tokens:]
            parts.append(
                attention.prefill(
                    stage.q_nope, q_rope, stage.latent, stage.k_rope, cache, metadata.prefill
                )
            )
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if attention.value_bias is None else out.add_(attention.value_bias)

    def _without_batch(
        self, rows: torch.Tensor, project: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        """The layer's output of a profile run or an idle step, which have no cache.

        rows:    what `project` takes, [num_tokens, ...]
        project: the stage before attention
        """
        num_tokens = rows.shape[0]
        # Not rows.new_zeros: the rows may be a QuantizedActivation.
        dtype, device = rows.dtype, rows.device
        if self.mla_attn.kv_cache is None:
            # vLLM measures how much memory a step takes: as much as the largest prefill needs.
            project(rows)
            elements = 2 * (self.qk_head_dim + self.v_head_dim) * self.num_heads
            num_rows = max(num_tokens, CONTEXT_CHUNK_ROWS)
            torch.empty(num_rows, elements, dtype=dtype, device=device)
        out_size = self.num_heads * self.v_head_dim
        return self.o_proj(torch.zeros(num_tokens, out_size, dtype=dtype, device=device))[0]


def _without_padding(rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return rows if rows.shape[0] == num_tokens else map_rows(rows, lambda each: each[:num_tokens])
