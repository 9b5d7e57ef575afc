"""Multi-head MLA: absorbed over the cache for decodes, expanded for prefills."""

from typing import Any

import torch
import torch_npu
from vllm.v1.attention.backend import AttentionImplBase

from vllm_davinci.core.attention.masks import compressed_causal_mask
from vllm_davinci.core.attention.mla.cache import LatentCache
from vllm_davinci.core.attention.mla.context import ContextChunk
from vllm_davinci.core.attention.mla.metadata import LatentDecode, LatentPrefill, NPUMLAMetadata
from vllm_davinci.core.attention.paged import ALL_TOKENS, SPARSE_MODE_CAUSAL, SPARSE_MODE_NONE
from vllm_davinci.core.components.fused_ops import compiled


class LatentAttention(AttentionImplBase[NPUMLAMetadata]):
    """Attention of one layer between queries and the latent cache. No state of a step is here.

    Decodes: the key up-projection W_UK is absorbed into the query, attention runs over the 512
    wide latent rows as if they were one key-value head, and W_UV turns its result into values.
    Prefills: `expand` makes keys and values per head, first of the new tokens, then of the
    cached context, chunk by chunk; the partial results are merged by their log-sum-exp.

    up_key:     W_UK, [num_heads, qk_nope_head_dim, kv_lora_rank]
    up_value:   W_UV, [num_heads, kv_lora_rank, v_head_dim]
    value_bias: [num_heads * v_head_dim], or None where the norm of latent rows has no bias b. The
                cache holds rows without it. W_UK b adds the same to a query's score of every key,
                which the softmax does not see, and W_UV b the same to every value.
    """

    up_key: torch.Tensor
    up_value: torch.Tensor
    value_bias: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        v_head_dim: int,
        kv_a_layernorm: Any,
        kv_b_proj: Any,
    ) -> None:
        self.num_heads = num_heads
        self.scale = float(scale)
        self.qk_nope_head_dim = qk_nope_head_dim
        self.v_head_dim = v_head_dim
        self.kv_a_layernorm = kv_a_layernorm
        self.kv_b_proj = kv_b_proj

    def prepare(self, weight: torch.Tensor) -> None:
        """Takes W_UK and W_UV from the joint up-projection.

        weight: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
        """
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        up_key, up_value = weight.view(self.num_heads, sum(sizes), -1).split(sizes, dim=1)
        self.up_key = up_key.contiguous()
        self.up_value = up_value.transpose(1, 2).contiguous()
        bias = self.kv_a_layernorm.loaded_bias
        self.value_bias = None
        if bias is not None:
            self.value_bias = (bias.float() @ self.up_value.float()).flatten().to(weight.dtype)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Queries in the latent space.

        q_nope: [num_tokens, num_heads, qk_nope_head_dim], heads may be strided
        Returns [num_tokens, num_heads, kv_lora_rank], contiguous.
        """
        return torch_npu.npu_transpose_batchmatmul(
            q_nope, self.up_key, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )

    def decode(
        self,
        absorbed: torch.Tensor,
        q_rope: torch.Tensor,
        cache: LatentCache,
        metadata: LatentDecode,
    ) -> torch.Tensor:
        """Attends over the cache, which holds this step's tokens already.

        absorbed: [num_decode_tokens, num_heads, kv_lora_rank]
        q_rope:   [num_decode_tokens, num_heads, qk_rope_head_dim]
        Returns [num_decode_tokens, num_heads * v_head_dim].
        """
        is_single = metadata.max_query_len == 1
        mask = None if is_single else compressed_causal_mask(absorbed.device)
        if attend := compiled("mla_decode_attention"):
            return attend(
                absorbed,
                q_rope,
                cache.latent,
                cache.rotary,
                metadata.block_table,
                metadata.actual_seq_lengths_q,
                metadata.seq_lens,
                mask,
                self.up_value,
                self.scale,
            )
        latent, _ = torch_npu.npu_fused_infer_attention_score(
            absorbed,
            cache.latent_flat,
            cache.latent_flat,
            query_rope=q_rope,
            key_rope=cache.rotary_flat,
            atten_mask=mask,
            sparse_mode=SPARSE_MODE_NONE if is_single else SPARSE_MODE_CAUSAL,
            block_table=metadata.block_table,
            actual_seq_lengths=metadata.actual_seq_lengths_q,
            actual_seq_lengths_kv=metadata.seq_lens,
            num_heads=self.num_heads,
            num_key_value_heads=1,
            scale=self.scale,
            input_layout="TND_NTD",
            block_size=cache.block_size,
        )
        return torch_npu.npu_transpose_batchmatmul(
            latent, self.up_value, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        ).flatten(1)

    def prefill(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        cache: LatentCache,
        metadata: LatentPrefill,
    ) -> torch.Tensor:
        """Attends over the new tokens of each request and over its cached context.

        q_nope: [num_prefill_tokens, num_heads, qk_nope_head_dim], heads may be strided
        q_rope: [num_prefill_tokens, num_heads, qk_rope_head_dim]
        latent: [num_prefill_tokens, kv_lora_rank], of the new tokens, normalized
        k_rope: [num_prefill_tokens, qk_rope_head_dim], of the new tokens, rotated
        Returns [num_prefill_tokens, num_heads * v_head_dim].
        """
        q_nope = q_nope.contiguous()
        ends = metadata.actual_seq_lengths_q
        out, lse = self._attend(
            q_nope,
            q_rope,
            *self.expand(latent, k_rope),
            actual_seq_lengths_q=ends,
            actual_seq_lengths_kv=ends,
            mask=compressed_causal_mask(q_nope.device),
            returns_lse=bool(metadata.context),
        )
        for chunk in metadata.context:
            rows = chunk.query_rows
            partial, partial_lse = self._attend(
                q_nope[rows],
                q_rope[rows],
                *self.expand(*_gather(cache, chunk)),
                actual_seq_lengths_q=chunk.actual_seq_lengths_q,
                actual_seq_lengths_kv=chunk.actual_seq_lengths_kv,
                mask=None,
                returns_lse=True,
            )
            merged, merged_lse = torch_npu.npu_attention_update(
                [lse[rows].flatten(), partial_lse.flatten()],
                [out[rows].flatten(0, 1), partial.flatten(0, 1)],
                1,  # with the log-sum-exp of the whole
            )
            out[rows].copy_(merged.view_as(partial))
            lse[rows].copy_(merged_lse.view_as(partial_lse))
        return out.flatten(1)

    def expand(
        self, latent: torch.Tensor, k_rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values per head.

        latent: [num_tokens, kv_lora_rank]
        k_rope: [num_tokens, qk_rope_head_dim]
        Returns the keys' part without position [num_tokens, num_heads, qk_nope_head_dim], their
        rotary part [num_tokens, num_heads, qk_rope_head_dim] and the values [num_tokens,
        num_heads, v_head_dim], all contiguous.
        """
        joint = self.kv_b_proj(latent)[0].unflatten(-1, (self.num_heads, -1))
        k_nope, value = joint.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_rope = k_rope.unsqueeze(1).expand(-1, self.num_heads, -1)
        return k_nope.contiguous(), k_rope.contiguous(), value.contiguous()

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        value: torch.Tensor,
        *,
        actual_seq_lengths_q: list[int],
        actual_seq_lengths_kv: list[int],
        mask: torch.Tensor | None,
        returns_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Result [tokens, heads, v_head_dim] and log-sum-exp [tokens, heads, 1] in fp32.

        mask: the compressed causal one, or None where every query sees every key
        returns_lse: whether the log-sum-exp is computed; else it holds anything, or is None
        """
        query, key = q_nope, k_nope
        query_rope: torch.Tensor | None = q_rope
        key_rope: torch.Tensor | None = k_rope
        if self.qk_nope_head_dim != self.v_head_dim:
            # The operator takes separate rotary parts only beside heads of one size.
            query, key = torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope], -1)
            query_rope = key_rope = None
        sparse_mode = SPARSE_MODE_NONE if mask is None else SPARSE_MODE_CAUSAL
        if attend := compiled("prefill_attention"):
            return attend(
                query,
                key,
                value,
                query_rope,
                key_rope,
                actual_seq_lengths_q,
                actual_seq_lengths_kv,
                mask,
                self.scale,
                sparse_mode,
                ALL_TOKENS,
                ALL_TOKENS,
                returns_lse,
            )
        return torch_npu.npu_fused_infer_attention_score(
            query,
            key,
            value,
            query_rope=query_rope,
            key_rope=key_rope,
            actual_seq_lengths=actual_seq_lengths_q,
            actual_seq_lengths_kv=actual_seq_lengths_kv,
            atten_mask=mask,
            sparse_mode=sparse_mode,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            scale=self.scale,
            input_layout="TND",
            softmax_lse_flag=returns_lse,
        )


def _gather(cache: LatentCache, chunk: ContextChunk) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk's rows of the cache, one request after the other: latent and rotary parts."""
    num_rows = chunk.actual_seq_lengths_kv[-1]
    latent = cache.latent.new_empty(num_rows, 1, cache.latent.shape[-1])
    rotary = cache.rotary.new_empty(num_rows, 1, cache.rotary.shape[-1])
    torch_npu.npu_gather_pa_kv_cache(
        cache.latent,
        cache.rotary,
        chunk.block_table,
        chunk.lengths,
        latent,
        rotary,
        seq_offset=chunk.starts,
    )
    return latent.squeeze(1), rotary.squeeze(1)
