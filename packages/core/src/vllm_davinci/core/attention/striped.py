"""Grouped-query attention with the context divided among ranks."""

from typing import Any

import torch

from vllm_davinci.core.attention.head_sizes import dense_head_size
from vllm_davinci.core.attention.masks import mask_for, masking
from vllm_davinci.core.attention.metadata import NPUAttentionMetadata
from vllm_davinci.core.attention.paged import NPUAttentionImpl
from vllm_davinci.core.attention.paged_cache import PagedCache
from vllm_davinci.core.attention.stripe_exchange import StripeExchange, joined
from vllm_davinci.core.device import fused_attention
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.graph.host_lengths import attend


class NPUStripedAttentionImpl(NPUAttentionImpl):
    """One attention layer under decode context parallelism.

    The ranks of a group have the same key-value head and different heads of the queries. In a
    decode step, the queries of all heads attend to this rank's tokens, the new one included. In
    other steps they attend only to tokens of earlier steps; this rank's queries attend causally to
    the new tokens, whose keys and values every rank has.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = {
            "a window (sliding attention)": self.sliding_window is not None,
            "sinks": self._sinks is not None,
            "soft-capped scores, ALiBi or wide heads": self.composed is not None,
            "bidirectional attention": self._is_encoder,
            "another layer's cache": not self.writes_cache,
        }
        if reasons := [reason for reason, is_asked in refused.items() if is_asked]:
            raise UnsupportedFeatureError(
                f"This model's attention needs {', '.join(reasons)}, which {RELEASE} cannot divide "
                "among ranks. Start with --decode-context-parallel-size 1."
            )
        self._exchange = StripeExchange()
        self._all_options = masking(False, None)

    def _taken_head_size(self) -> int:
        taken = super()._taken_head_size()
        mode = self._causal_options["sparse_mode"]
        dtype = torch.get_default_dtype()
        new = dense_head_size(self.num_heads, self.num_kv_heads, self.head_size, dtype, mode)
        return max(taken, new)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: PagedCache,
        attn_metadata: NPUAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        assert key is not None and value is not None
        kv_cache.write(key, value, attn_metadata.slot_mapping)
        has_earlier = attn_metadata.has_earlier
        if has_earlier is None:
            merged, _ = self._attend_to_stripes(query, kv_cache, attn_metadata)
            out.copy_(merged)
            return
        lse = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
        self._attend_to_new(query, key, value, attn_metadata, [out, lse], has_earlier)
        if has_earlier:
            earlier = self._attend_to_stripes(query, kv_cache, attn_metadata)
            joined((out, lse), earlier, out)

    def _attend_to_stripes(
        self, query: torch.Tensor, cache: PagedCache, metadata: NPUAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Lets all queries attend to all ranks' tokens. Returns the result and its log-sum-exp."""
        query = self._exchange.all_heads(query)
        part = torch.empty_like(query)
        lse = query.new_empty(*query.shape[:2], 1, dtype=torch.float32)
        arguments = self._arguments(self._all_options, cache, metadata.block_table)
        arguments |= {"num_heads": query.shape[1], "softmax_lse_flag": True}
        tensors = query, cache.key_flat, cache.value_flat
        attend(metadata.host_lengths, tensors, [part, lse], metadata.step_lengths(), **arguments)
        return self._exchange.combine(part, lse)

    def _attend_to_new(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: NPUAttentionMetadata,
        out: list[torch.Tensor],
        returns_lse: bool,
    ) -> None:
        """Lets this rank's queries attend to the step's new tokens, into `out`."""
        ends, options = metadata.actual_seq_lengths_q, dict[str, Any](self._causal_options)
        fused_attention.attend(
            query,
            key,
            value,
            ends,
            ends,
            out if returns_lse else [out[0], self._lse(query.device)],
            atten_mask=mask_for(options, query.device),
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            input_layout="TND",
            softmax_lse_flag=returns_lse,
            **options,
        )
