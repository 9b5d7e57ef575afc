"""MLA with the context divided among ranks (decode context parallelism)."""

from typing import Any

import torch
import torch_npu

from vllm_davinci.core.attention import masks
from vllm_davinci.core.attention.mla.adapters import in_step
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.context import ContextChunk
from vllm_davinci.core.attention.mla.impl import NPUMLAImpl
from vllm_davinci.core.attention.mla.metadata import MLADecodeMetadata
from vllm_davinci.core.attention.mla.operator_heads import with_heads
from vllm_davinci.core.attention.mla.striped_context import StripedChunk
from vllm_davinci.core.attention.stripe_exchange import StripeExchange
from vllm_davinci.core.graph.host_lengths import HostLengths, attend


class NPUStripedMLAImpl(NPUMLAImpl):
    """Attention of one layer under decode context parallelism.

    Decodes: the queries of all heads attend to this rank's rows, and the ranks' results are merged.
    Prefills: every rank gathers all rows of the context in token order, then attends as usual.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange = StripeExchange()

    def decode(
        self,
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: MLACache,
        metadata: MLADecodeMetadata,
        host_lengths: HostLengths | None = None,
    ) -> torch.Tensor:
        assert metadata.max_query_len == 1, (
            "Speculative decoding is not supported with a divided context."
        )
        query, query_rope = (self._exchange.all_heads(each) for each in (ql_nope, q_pe))
        num_heads, taken = query.shape[1], self.decode_heads
        query, query_rope = with_heads(query, taken), with_heads(query_rope, taken)
        part = torch.empty_like(query)
        lse = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
        tensors = query, cache.kv_c_flat, cache.kv_c_flat
        lengths = metadata.actual_seq_lengths_q, metadata.seq_lens
        arguments: dict[str, Any] = {
            "query_rope": query_rope,
            "key_rope": cache.k_pe_flat,
            "atten_mask": None,
            "sparse_mode": masks.SPARSE_MODE_NONE,
            "block_table": metadata.block_table,
            "num_heads": taken,
            "num_key_value_heads": 1,
            "scale": self.scale,
            "input_layout": "TND",
            "block_size": cache.kv_c.shape[1],
            "softmax_lse_flag": True,
        }
        attend(host_lengths, tensors, [part, lse], lengths, **arguments)
        merged, _ = self._exchange.combine(part[:, :num_heads], lse[:, :num_heads])
        merged = merged.to(ql_nope.dtype)
        values: torch.Tensor = torch_npu.npu_transpose_batchmatmul(
            merged,
            self.W_UV,
            perm_x1=(1, 0, 2),
            perm_x2=(0, 1, 2),
            perm_y=(1, 0, 2),
        )
        if (adapters := in_step(self.adapters)) is not None:
            adapters.add_to_values(values, merged.transpose(0, 1))
        return values.flatten(1)

    def _rows_of(self, chunk: ContextChunk, cache: MLACache) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(chunk, StripedChunk) and chunk.order is not None
        kv_c, k_pe = (self._exchange.all_rows(rows) for rows in cache.gather(chunk))
        return kv_c.index_select(0, chunk.order), k_pe.index_select(0, chunk.order)
