"""Spans of a prompt whose tokens see each other both ways: an image of Gemma3, all of PaliGemma's.

A token of a span sees what a causal one sees, and the rest of its span: all keys up to the span's
end. So the rows of a span attend like a request that ends there, to every key, and in layers with a
window to those from the window's start on. The operator takes both over a paged cache; a mask per
request it does not.
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

    rows:                 [num_rows], int64, on the device: their tokens among the step's
    actual_seq_lengths_q: per span, the end of its rows among `rows`. Host list.
    seq_lens:             per span, all tokens of its request up to its end. Host list.
    requests:             [num_spans], int64, on the device: whose they are
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
        """ranges: of each request, first and last position of every span of its prompt

        ends, seq_lens, block_table: see NPUAttentionMetadata
        None for a step without tokens of any span. Raises UnsupportedFeatureError for a span that
        only begins in this step: its tokens would have to see keys that do not exist yet.
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
                        f"An image, or a prompt with one, at tokens {first} to {last} was cut at "
                        f"{seq_lens[request]}, and its tokens see each other both ways. Start with "
                        "a larger --max-num-batched-tokens, and without "
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
        """Their lengths, as attention in torch's operators takes them."""
        return ComposedPlan(self.actual_seq_lengths_q, self.seq_lens, self.block_table.device)

    def over(self, block_table: torch.Tensor) -> "BidirectionalSpans":
        """The same in a cache with another table: [num_reqs, max_blocks], int32, on the device."""
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
        """Attention of the spans' rows, in place of what a causal one put there.

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
    images: Mapping[int, Sequence[tuple[int, int]]], prompt_lens: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Ranges as `of_step` takes them, of all of each prompt that has an image.

    images:      first and last position of the images of each request
    prompt_lens: of each request, tokens of its prompt
    """
    return {
        request: [(0, int(prompt_lens[request]) - 1)]
        for request, ranges in images.items()
        if ranges
    }


def tell_prompt_lens(
    model: ModelConfig,
    groups: Iterable[Sequence[AttentionGroup]],
    prompt_lens: Callable[[], Sequence[int]],
) -> None:
    """Lets builders of metadata know prompts, of a model in which all of one sees itself both ways.

    groups:      by cache group
    prompt_lens: gives the lengths of the batch's prompts
    """
    if bidirectional(model) is not Bidirectional.PROMPTS:
        return
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
