"""MLA core attention: absorbed queries for decodes, expanded keys and values for prefills."""

from typing import Any

import torch
import torch_npu
from torch.nn.functional import pad
from vllm.v1.attention.backend import AttentionImplBase

from vllm_davinci import operators
from vllm_davinci.core.attention import masks
from vllm_davinci.core.attention.mla.adapters import UpProjectionAdapters, in_step
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.context import ContextChunk
from vllm_davinci.core.attention.mla.metadata import (
    MLADecodeMetadata,
    MLAPrefillMetadata,
    NPUMLAMetadata,
)
from vllm_davinci.core.attention.mla.operator_heads import as_prefill_takes, with_heads
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.graph.host_lengths import HostLengths


class NPUMLAImpl(AttentionImplBase[NPUMLAMetadata]):
    """Attention of one layer. Holds no state of a step.

    Decodes: the key up-projection W_UK is absorbed into the query, attention runs over the 512
    wide kv_c rows as if they were one key-value head, and W_UV turns its result into values.
    Prefills: `expand` makes keys and values per head, first for the new tokens, then for the cached
    context, chunk by chunk; the partial results are merged by their log-sum-exp.

    W_UK:       [num_heads, qk_nope_head_dim, kv_lora_rank]
    W_UV:       [num_heads, kv_lora_rank, v_head_dim]
    value_bias: [num_heads * v_head_dim], or None if the norm of kv_c has no bias b. The
                cache holds rows without b: W_UK b adds the same to a query's scores of all
                keys, which softmax ignores, and W_UV b adds the same to every value.
    decode_heads:  number of heads in calls of the operator over the cache: all heads that attend
                   together, or more, zero-padded
    prefill_sizes: head sizes of the part without position and of the values in calls of the
                   prefill operator: the model's sizes, or larger ones, zero-padded
    """

    W_UK: torch.Tensor
    W_UV: torch.Tensor
    value_bias: torch.Tensor | None
    adapters: UpProjectionAdapters | None = None  # adapters of kv_b_proj, if it has any

    supports_pcp = True

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        v_head_dim: int,
        kv_a_layernorm: Any,
        kv_b_proj: Any,
        decode_heads: int,
        prefill_sizes: tuple[int, int],
    ) -> None:
        self.decode_heads = decode_heads
        self.prefill_sizes = prefill_sizes
        self.num_heads = num_heads
        self.scale = float(scale)
        self.qk_nope_head_dim = qk_nope_head_dim
        self.v_head_dim = v_head_dim
        self.kv_a_layernorm = kv_a_layernorm
        self.kv_b_proj = kv_b_proj

    def absorb_up_projection(self, weight: torch.Tensor) -> None:
        """Splits the joint up-projection kv_b_proj into W_UK and W_UV.

        weight: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
        """
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        keys, values = weight.view(self.num_heads, sum(sizes), -1).split(sizes, dim=1)
        self.W_UK = _kept(getattr(self, "W_UK", None), keys.contiguous())
        self.W_UV = _kept(getattr(self, "W_UV", None), values.transpose(1, 2).contiguous())
        bias = self.kv_a_layernorm.loaded_bias
        if bias is None:
            self.value_bias = None
        else:
            value_bias = (bias.float() @ self.W_UV.float()).flatten().to(weight.dtype)
            self.value_bias = _kept(getattr(self, "value_bias", None), value_bias)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Multiplies queries by W_UK.

        q_nope: [num_tokens, num_heads, qk_nope_head_dim], heads may be strided
        Returns [num_tokens, num_heads, kv_lora_rank], contiguous.
        """
        absorbed = torch_npu.npu_transpose_batchmatmul(
            q_nope, self.W_UK, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        adapters = in_step(self.adapters)
        return absorbed if adapters is None else adapters.add_to_queries(absorbed, q_nope)

    def decode(
        self,
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: MLACache,
        metadata: MLADecodeMetadata,
        host_lengths: HostLengths | None = None,
    ) -> torch.Tensor:
        """Attends over the cache, which already holds this step's tokens.

        ql_nope: [num_decode_tokens, num_heads, kv_lora_rank]
        q_pe:    [num_decode_tokens, num_heads, qk_rope_head_dim]
        host_lengths: records the launch while a graph is captured
        Returns [num_decode_tokens, num_heads * v_head_dim].
        """
        attend, adapters = fused_op(operators.mla_decode_attention), in_step(self.adapters)
        pads = self.decode_heads > self.num_heads  # of the compiled operator, W_UV has all heads
        if attend and host_lengths is None and adapters is None and not pads:
            return attend(
                ql_nope=ql_nope,
                q_pe=q_pe,
                kv_c_cache=cache.kv_c,
                k_pe_cache=cache.k_pe,
                block_table=metadata.block_table,
                actual_seq_lengths_q=metadata.actual_seq_lengths_q,
                seq_lens=metadata.seq_lens,
                mask=_mask(metadata, ql_nope.device),
                W_UV=self.W_UV,
                scale=self.scale,
            )
        # Padded per step, in two small launches, and not once in the weights: W_UK with more heads
        # needs q_proj with more, whose integers, adapters and later loads would need them too.
        query, query_rope = (with_heads(each, self.decode_heads) for each in (ql_nope, q_pe))
        out = self._attend_over_cache(query, query_rope, cache, metadata, host_lengths)
        out = out[: self.num_heads]  # contiguous
        values = torch_npu.npu_transpose_batchmatmul(
            out, self.W_UV, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        return (values if adapters is None else adapters.add_to_values(values, out)).flatten(1)

    def _attend_over_cache(
        self,
        query: torch.Tensor,
        query_rope: torch.Tensor,
        cache: MLACache,
        metadata: MLADecodeMetadata,
        host_lengths: HostLengths | None,
    ) -> torch.Tensor:
        """See `decode`, whose queries have `decode_heads` heads here.

        Returns [decode_heads, num_decode_tokens, kv_lora_rank].
        """
        mask = _mask(metadata, query.device)
        tensors = query, cache.kv_c_flat, cache.kv_c_flat
        lengths = metadata.actual_seq_lengths_q, metadata.seq_lens
        arguments: dict[str, Any] = {
            "query_rope": query_rope,
            "key_rope": cache.k_pe_flat,
            "atten_mask": mask,
            "sparse_mode": masks.SPARSE_MODE_NONE if mask is None else masks.SPARSE_MODE_CAUSAL,
            "block_table": metadata.block_table,
            "num_heads": self.decode_heads,
            "num_key_value_heads": 1,
            "scale": self.scale,
            "input_layout": "TND_NTD",
            "block_size": cache.kv_c.shape[1],
        }
        if host_lengths is None:
            out, _ = torch_npu.npu_fused_infer_attention_score(
                *tensors,
                actual_seq_lengths=lengths[0],
                actual_seq_lengths_kv=lengths[1],
                **arguments,
            )
        else:
            out = query.new_empty(query.transpose(0, 1).shape)
            no_lse = query.new_empty(0, dtype=torch.float32)
            host_lengths.attend(*tensors, [out, no_lse], *lengths, **arguments)
        return out

    def prefill(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        cache: MLACache,
        metadata: MLAPrefillMetadata,
    ) -> torch.Tensor:
        """Attends over the new tokens of each request and over its cached context.

        q_nope:      [num_prefill_tokens, num_heads, qk_nope_head_dim], heads may be strided
        q_pe:        [num_prefill_tokens, num_heads, qk_rope_head_dim], rotated
        kv_c_normed: [num_prefill_tokens, kv_lora_rank], of the new tokens
        k_pe:        [num_prefill_tokens, qk_rope_head_dim], of the new tokens, rotated
        Returns [num_prefill_tokens, num_heads * v_head_dim].
        """
        q_nope = q_nope.contiguous()
        ends = metadata.actual_seq_lengths_q
        adapters = in_step(self.adapters)
        foreign = None if adapters is None else adapters.step.foreign_to(metadata.rows)
        out, lse = self._attend(
            q_nope,
            q_pe,
            *self.expand(kv_c_normed, k_pe, foreign),
            actual_seq_lengths_q=ends,
            actual_seq_lengths_kv=ends,
            mask=masks.compressed_causal_mask(q_nope.device),
            returns_lse=bool(metadata.context),
        )
        for chunk in metadata.context:
            rows = chunk.query_rows
            partial, partial_lse = self._attend(
                q_nope[rows],
                q_pe[rows],
                *self.expand(*self._rows_of(chunk, cache), chunk.of_rows(foreign)),
                actual_seq_lengths_q=chunk.actual_seq_lengths_q,
                actual_seq_lengths_kv=chunk.actual_seq_lengths_kv,
                mask=None,
                returns_lse=True,
            )
            assert lse is not None and partial_lse is not None
            merged, merged_lse = torch_npu.npu_attention_update(
                [lse[rows].flatten(), partial_lse.flatten()],
                [out[rows].flatten(0, 1), partial.flatten(0, 1)],
                1,  # 1: also return the merged log-sum-exp
            )
            out[rows].copy_(merged.view_as(partial))
            lse[rows].copy_(merged_lse.view_as(partial_lse))
        return out.flatten(1)

    def _rows_of(self, chunk: ContextChunk, cache: MLACache) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_c [num_rows, kv_lora_rank] and k_pe [num_rows, qk_rope_head_dim] of the chunk."""
        return cache.gather(chunk)

    def expand(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, foreign: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values per head.

        kv_c_normed: [num_tokens, kv_lora_rank]
        k_pe:        [num_tokens, qk_rope_head_dim]
        foreign:     columns of other rows' adapters; None in a step without adapters
        Returns the keys' part without position [num_tokens, num_heads, qk_nope_head_dim], their
        rotary part [num_tokens, num_heads, qk_rope_head_dim] and the values [num_tokens,
        num_heads, v_head_dim], all contiguous.
        """
        joint = self.kv_b_proj(kv_c_normed)[0]
        if foreign is not None:
            assert self.adapters is not None
            self.adapters.add_to_expanded(joint, kv_c_normed, foreign)
        joint = joint.unflatten(-1, (self.num_heads, -1))
        k_nope, value = joint.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_pe = k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)
        return k_nope.contiguous(), k_pe.contiguous(), value.contiguous()

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        value: torch.Tensor,
        *,
        actual_seq_lengths_q: list[int],
        actual_seq_lengths_kv: list[int],
        mask: torch.Tensor | None,
        returns_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result [tokens, heads, v_head_dim] and log-sum-exp [tokens, heads, 1] in fp32.

        mask: the compressed causal one, or None where every query sees every key
        returns_lse: True computes the log-sum-exp; otherwise it is undefined or None
        """
        query, query_rope = as_prefill_takes(q_nope, q_pe, self.prefill_sizes)
        key, key_rope = as_prefill_takes(k_nope, k_pe, self.prefill_sizes)
        if filling := self.prefill_sizes[1] - self.v_head_dim:
            value = pad(value, (0, filling))
        sparse_mode = masks.SPARSE_MODE_NONE if mask is None else masks.SPARSE_MODE_CAUSAL
        if attend := fused_op(operators.prefill_attention):
            out, lse = attend(
                query=query,
                key=key,
                value=value,
                query_rope=query_rope,
                key_rope=key_rope,
                actual_seq_lengths_q=actual_seq_lengths_q,
                actual_seq_lengths_kv=actual_seq_lengths_kv,
                mask=mask,
                scale=self.scale,
                sparse_mode=sparse_mode,
                pre_tokens=masks.ALL_TOKENS,
                next_tokens=masks.ALL_TOKENS,
                returns_lse=returns_lse,
            )
        else:
            out, lse = torch_npu.npu_fused_infer_attention_score(
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
        if filling:
            out = out[..., : self.v_head_dim].contiguous()
        return out, lse


def _mask(metadata: MLADecodeMetadata, device: torch.device) -> torch.Tensor | None:
    """The compressed causal mask; None if every query is its request's last."""
    return None if metadata.max_query_len == 1 else masks.compressed_causal_mask(device)


def _kept(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Writes `new` into `old` if captured graphs read it; returns the tensor to use."""
    if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
        return new
    return old.copy_(new)
