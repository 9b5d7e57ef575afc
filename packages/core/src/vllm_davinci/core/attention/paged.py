"""Grouped-query attention over a paged cache: two launches per layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from vllm_davinci import operators
from vllm_davinci.core.attention.composed import ComposedAttention, ScoreRule
from vllm_davinci.core.attention.head_sizes import (
    dense_head_size,
    paged_head_size,
    require_requests,
)
from vllm_davinci.core.attention.masks import ALL_TOKENS, mask_for, masking
from vllm_davinci.core.attention.metadata import NPUAttentionMetadata
from vllm_davinci.core.attention.paged_cache import PagedCache
from vllm_davinci.core.attention.spans import span_masking
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.device import fused_attention
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.graph.host_lengths import attend


class NPUAttentionImpl(AttentionImpl[NPUAttentionMetadata]):
    """One attention layer. Lengths come from host lists; nothing here reads from the device.

    operator_head_size: head size in the operator's calls and in the cache: head_size, or the next
                        supported size, zero-padded
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        rule = ScoreRule(float(scale), sliding_window, logits_soft_cap or None, alibi_slopes)
        beyond = rule.beyond_operator(head_size)
        is_composed = bool(beyond)
        refused = {
            f"{beyond} beside sinks": is_composed and sinks is not None,
            f"{beyond} in attention of type {attn_type!r}": (
                is_composed and attn_type != AttentionType.DECODER
            ),
            f"attention of type {attn_type!r}": attn_type == AttentionType.ENCODER,
        }
        refused |= {
            f"attention option {name!r}": True for name, value in extra.items() if value is not None
        }
        if reasons := [reason for reason, is_asked in refused.items() if is_asked]:
            raise UnsupportedFeatureError(
                f"This model's attention needs {', '.join(reasons)}, which {RELEASE} "
                "cannot compute on the NPU and will not approximate. Choose another model."
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.attn_type = attn_type
        # Layers that read another layer's cache never write one.
        self.writes_cache = kv_sharing_target_layer_name is None
        self._sinks = sinks
        self._is_encoder = attn_type == AttentionType.ENCODER_ONLY
        self._is_cross = attn_type == AttentionType.ENCODER_DECODER
        self._fuses = sinks is None and not self._is_cross  # not cross-attention's separate keys
        self._causal_options = masking(True, sliding_window)
        self._bidirectional_options = masking(False, sliding_window)
        self._span_options = span_masking(sliding_window)
        self._unused_lse: torch.Tensor | None = None
        self.composed = ComposedAttention(rule, self.num_kv_heads) if is_composed else None
        self.operator_head_size = head_size if is_composed else self._taken_head_size()

    def _taken_head_size(self) -> int:
        """Returns operator_head_size. Raises UnsupportedFeatureError if no size is supported."""
        sees_all = self._is_encoder or self._is_cross
        options = self._bidirectional_options if sees_all else self._causal_options
        config = get_current_vllm_config_or_none()
        model = config.model_config if config is not None else None
        dtype = model.dtype if model is not None else torch.get_default_dtype()
        # With a divided context, the queries of all ranks attend here.
        heads = (self.num_heads * self.dcp_world_size, self.num_kv_heads)
        sizes = (*heads, self.head_size, dtype, options["sparse_mode"])
        taken = (
            dense_head_size(*sizes)
            if self._is_encoder
            else paged_head_size(*sizes, has_sinks=self._sinks is not None)
        )
        if config is not None:
            require_requests(
                config.scheduler_config.max_num_seqs,
                *heads,
                taken,
                dtype,
                options["sparse_mode"],
                is_paged=not self._is_encoder,
            )
        return taken

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: PagedCache,
        attn_metadata: NPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes this step's keys and values, then attends.

        query:  [num_tokens, num_heads, head_size]
        key:    [num_tokens, num_kv_heads, head_size], or None if another layer wrote the cache.
                Cross-attention: [tokens of the step's new encoder outputs, ...], or None.
        value:  like key
        output: [num_tokens, num_heads, head_size], written in place, also returned
        attn_metadata is None in profile runs, which have no cache: output becomes zero.
        Runs on the current stream.
        """
        if attn_metadata is None:
            if self.composed is not None:
                self.composed.take_most_memory(query)
            return output.zero_()
        num_tokens = attn_metadata.num_actual_tokens
        if num_tokens != query.shape[0]:
            output[num_tokens:].zero_()
            query, out = query[:num_tokens], output[:num_tokens]
            if key is not None and value is not None and not self._is_cross:
                key, value = key[:num_tokens], value[:num_tokens]
        else:
            out = output
        if filling := self.operator_head_size - self.head_size:
            query = pad(query, (0, filling))
            if key is not None and value is not None:
                key, value = pad(key, (0, filling)), pad(value, (0, filling))
            whole = torch.empty_like(query)
            self._attend(query, key, value, kv_cache, attn_metadata, whole)
            out.copy_(whole[..., : self.head_size])
        else:
            self._attend(query, key, value, kv_cache, attn_metadata, out)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: PagedCache,
        attn_metadata: NPUAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """`forward` with heads of operator_head_size, without padding tokens."""
        if self.composed is not None:
            if self.writes_cache and key is not None and value is not None:
                kv_cache.write(key, value, attn_metadata.slot_mapping)
            self.composed.attend(query, kv_cache, attn_metadata, out)
            return
        if self._is_encoder:
            assert key is not None and value is not None
            self._attend_to_batch(query, key, value, attn_metadata, out)
        elif (
            self._fuses
            and attn_metadata.host_lengths is None
            and (stage := fused_op(operators.paged_attention))
        ):
            self._attend_fused(stage, query, key, value, kv_cache, attn_metadata, out)
        else:
            if self.writes_cache and key is not None and value is not None:
                kv_cache.write(key, value, attn_metadata.slot_mapping)
            self._attend_to_cache(query, kv_cache, attn_metadata, out)
        if (spans := attn_metadata.spans) is not None:
            tensors = query, kv_cache.key_flat, kv_cache.value_flat, out, self._lse(query.device)
            spans.attend(
                *tensors, **self._arguments(self._span_options, kv_cache, spans.block_table)
            )

    def _attend_fused(
        self,
        stage: Callable[..., None],
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedCache,
        metadata: NPUAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Writes to the cache and runs `_attend_to_cache` in one call."""
        options = self._causal_options if metadata.causal else self._bidirectional_options
        writes = self.writes_cache and key is not None
        stage(
            query=query,
            key=key if writes else None,
            value=value if writes else None,
            key_cache=cache.key,
            value_cache=cache.value,
            slot_mapping=metadata.slot_mapping,
            block_table=metadata.block_table,
            actual_seq_lengths_q=metadata.actual_seq_lengths_q,
            seq_lens=metadata.seq_lens,
            mask=mask_for(options, query.device),
            scale=self.scale,
            sparse_mode=options["sparse_mode"],
            pre_tokens=options.get("pre_tokens", ALL_TOKENS),
            next_tokens=options.get("next_tokens", ALL_TOKENS),
            out=out,
        )

    def _attend_to_cache(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        metadata: NPUAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        options = self._causal_options if metadata.causal else self._bidirectional_options
        tensors = query, cache.key_flat, cache.value_flat
        outputs = [out, self._lse(query.device)]
        arguments = self._arguments(options, cache, metadata.block_table)
        attend(metadata.host_lengths, tensors, outputs, metadata.step_lengths(), **arguments)

    def _arguments(
        self, options: dict[str, int], cache: PagedCache, block_table: torch.Tensor
    ) -> dict[str, Any]:
        """Arguments of attention over the cache, except a call's tensors and lengths."""
        return {
            "atten_mask": mask_for(options, block_table.device),
            "block_table": block_table,
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "scale": self.scale,
            "input_layout": "TND",
            "block_size": cache.key.shape[1],
            "learnable_sink": self._learnable_sink(),
            **options,
        }

    def _attend_to_batch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: NPUAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        options: dict[str, Any] = self._bidirectional_options
        fused_attention.attend(
            query,
            key,
            value,
            metadata.actual_seq_lengths_q,
            metadata.actual_seq_lengths_q,
            [out, self._lse(query.device)],
            self._learnable_sink(),
            atten_mask=mask_for(options, query.device),
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            input_layout="TND",
            **options,
        )

    def _learnable_sink(self) -> torch.Tensor | None:
        """[num_heads], in the model's dtype: the layer's parameter itself, which reloads change."""
        return None if self._sinks is None else self._sinks.detach()

    def _lse(self, device: torch.device) -> torch.Tensor:
        """Buffer for the operator's second output, which is filled only on request."""
        if self._unused_lse is None:
            self._unused_lse = torch.empty(0, dtype=torch.float32, device=device)
        return self._unused_lse
