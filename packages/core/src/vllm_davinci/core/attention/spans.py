"""Bidirectional spans of a prompt: an image in Gemma3, the whole prompt in
PaliGemma and HRM-Text.

A token of a span sees the tokens before it and its whole span: all keys up to the span's end. So
the rows of a span attend like a request that ends there: to every key, or, in layers with a window,
to keys from the window's start. The operator supports both over a paged cache, but no mask per
request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.v1.worker.utils import AttentionGroup

from vllm_davinci.core.attention.composed_plan import ComposedPlan
from vllm_davinci.core.attention.masks import ALL_TOKENS, SPARSE_MODE_BAND, SPARSE_MODE_NONE
from vllm_davinci.core.config.architectures import Bidirectional, bidirectional
from vllm_davinci.core.device import fused_attention
from vllm_davinci.core.errors import UnsupportedFeatureError


@dataclass(frozen=True)
class BidirectionalSpans:
    """The spans of one step, as requests of the attention operator.

    rows:                 [num_rows], int64, on the device: rows of the spans' tokens in the step
    actual_seq_lengths_q: per span, the end of its rows among `rows`. Host list.
    seq_lens:             per span, tokens of its request up to the span's end. Host list.
    requests:             [num_spans], int64, on the device: request of each span
    block_table:          [num_spans, max_blocks], int32, on the device
    """

    rows: torch.Tensor
    actual_seq_lengths_q: list[int]
    seq_lens: list[int]
    requests: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def of_step(
        cls,
        ranges: Mapping[int, Sequence[tuple[int, int]]],
        ends: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
    ) -> "BidirectionalSpans | None":
        """Builds the step's spans; None for a step without tokens of any span.

        ranges: per request, first and last position of every span of its prompt
        ends, seq_lens, block_table: see NPUAttentionMetadata
        Raises UnsupportedFeatureError for a span that only begins in this step: its tokens would
        have to see keys that do not exist yet.
        """
        rows: list[int] = []
        query_ends: list[int] = []
        key_lens: list[int] = []
        requests: list[int] = []
        for request, spans in ranges.items():
            start = ends[request - 1] if request else 0
            computed = seq_lens[request] - (ends[request] - start)
            for first, last in spans:
                if first == last or last < computed or first >= seq_lens[request]:
                    continue
                if last >= seq_lens[request]:
                    raise UnsupportedFeatureError(
                        "--max-num-batched-tokens is too small: an image, or a prompt with one, "
                        f"at tokens {first} to {last} was cut at {seq_lens[request]}, and its "
                        "attention is bidirectional. Raise it, and remove "
                        "--no-disable-chunked-mm-input."
                    )
                begin = max(first, computed) - computed + start
                rows += range(begin, last + 1 - computed + start)
                query_ends.append(len(rows))
                key_lens.append(last + 1)
                requests.append(request)
        if not rows:
            return None
        numbers = torch.tensor(rows + requests, dtype=torch.int64, pin_memory=True)
        on_device = numbers.to(block_table.device, non_blocking=True)
        of_rows, of_requests = on_device.split((len(rows), len(requests)))
        table = block_table.index_select(0, of_requests)
        return cls(of_rows, query_ends, key_lens, of_requests, table)

    @cached_property
    def composed_plan(self) -> ComposedPlan:
        """The spans' lengths for composed attention."""
        return ComposedPlan(self.actual_seq_lengths_q, self.seq_lens, self.block_table.device)

    def over(self, block_table: torch.Tensor) -> "BidirectionalSpans":
        """The same spans with another cache's table: [num_reqs, max_blocks], int32, on device."""
        return replace(self, block_table=block_table.index_select(0, self.requests))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        **arguments: Any,
    ) -> None:
        """Attends for the spans' rows, overwriting the causal results.

        query, out: [num_tokens, num_heads, head_size], of the step; out is written
        key, value: the whole cache, see PagedCache; lse: not written
        arguments:  of fused_attention.attend, with `span_masking` and this block_table
        """
        rows = query.index_select(0, self.rows)
        both_ways = torch.empty_like(rows)
        lengths = self.actual_seq_lengths_q, self.seq_lens
        fused_attention.attend(rows, key, value, *lengths, [both_ways, lse], **arguments)
        out.index_copy_(0, self.rows, both_ways)


def whole_prompts(
    requests: Iterable[int], prompt_lens: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Ranges for `of_step` that cover the prompts of these requests.

    prompt_lens: prompt tokens of each request of the step
    """
    return {request: [(0, int(prompt_lens[request]) - 1)] for request in requests}


def tell_prompt_lens(
    model: ModelConfig,
    groups: Iterable[Sequence[AttentionGroup]],
    prompt_lens: Callable[[], Sequence[int]],
) -> None:
    """Gives prompt lengths to metadata builders of models with bidirectional prompts.

    groups:      by cache group
    prompt_lens: gives the lengths of the batch's prompts
    """
    if bidirectional(model) not in (Bidirectional.PROMPTS, Bidirectional.EVERY_PROMPT):
        return
    if not getattr(model.hf_text_config, "prefix_lm", True):
        prompt_lens = tuple  # HRM-Text with causal prompts
    for group in chain.from_iterable(groups):
        for builder in group.metadata_builders:
            builder.prompt_lens = prompt_lens


def span_masking(window: int | None) -> dict[str, int]:
    """Options of the operator for the rows of spans; window: see `masking`."""
    if window is None:
        return {"sparse_mode": SPARSE_MODE_NONE}
    return {
        "sparse_mode": SPARSE_MODE_BAND,
        "pre_tokens": window - 1,
        "next_tokens": ALL_TOKENS,  # keys end with the span
    }
