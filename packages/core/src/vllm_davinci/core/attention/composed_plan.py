"""Cuts a step into chunks of bounded memory for composed attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS

# Most elements of a chunk's gathered keys (all heads), and of its scores. One request, or one row
# of queries, may exceed it.
KEYS = 2**25
SCORES = 2**25


@dataclass(frozen=True)
class Piece:
    """A chunk: whole requests with equally many new tokens, or some new tokens of one request.

    rows:       the chunk's rows of the step's queries
    requests:   its rows of the block table
    num_blocks: blocks of the longest request, up to its last row here
    seq_lens:   [num_requests], int64, on the device: keys that are written
    positions:  [num_requests, tokens of each], int64, on the device: positions of the rows
    """

    rows: slice
    requests: slice
    num_blocks: int
    seq_lens: torch.Tensor
    positions: torch.Tensor

    @property
    def num_requests(self) -> int:
        return self.requests.stop - self.requests.start


class ComposedPlan:
    """Lengths of one step on the host and on the device, built once for all layers."""

    def __init__(self, ends: Sequence[int], seq_lens: Sequence[int], device: torch.device) -> None:
        """ends: cumulative query lengths; seq_lens: total tokens; both per request"""
        self._starts = [0, *ends[:-1]]
        self._query_lens = [end - start for start, end in zip(self._starts, ends, strict=True)]
        self._seq_lens = seq_lens
        numbers = torch.tensor(seq_lens, dtype=torch.int64, pin_memory=True)
        self._on_device = numbers.to(device, non_blocking=True)

    def pieces(self, num_heads: int, key_width: int) -> Iterator[Piece]:
        """num_heads: query heads; key_width: elements of one token's keys in all heads"""
        start = 0
        for query_len, group in groupby(self._query_lens):
            end = start + len(list(group))
            while start < end and query_len:
                stop = self._end_of_piece(start, end, num_heads * query_len, key_width)
                yield from self._of_requests(start, stop, query_len, num_heads)
                start = stop
            start = end

    def _end_of_piece(self, start: int, end: int, num_rows: int, key_width: int) -> int:
        """End of the chunk from `start`: one past its last request. num_rows: scores of each
        request"""
        longest = 0
        for stop in range(start, end):
            longest = max(longest, _num_blocks(self._seq_lens[stop]) * BLOCK_SIZE_TOKENS)
            num_keys = (stop + 1 - start) * longest
            if stop > start and (num_keys * key_width > KEYS or num_keys * num_rows > SCORES):
                return stop
        return end

    def _of_requests(
        self, start: int, stop: int, query_len: int, num_heads: int
    ) -> Iterator[Piece]:
        """One chunk, or several chunks of one request if its scores exceed the limit."""
        seq_lens = self._on_device[start:stop]
        num_blocks = _num_blocks(max(self._seq_lens[start:stop]))
        num_scores = (stop - start) * num_heads * num_blocks * BLOCK_SIZE_TOKENS
        step = query_len if stop - start > 1 else max(1, SCORES // num_scores)
        first_row = self._starts[start]
        for first in range(0, query_len, step):
            last = min(first + step, query_len)
            offsets = torch.arange(first - query_len, last - query_len, device=seq_lens.device)
            yield Piece(
                slice(first_row + first, first_row + (stop - start - 1) * query_len + last),
                slice(start, stop),
                num_blocks,
                seq_lens,
                seq_lens[:, None] + offsets,
            )


def most_elements(num_heads: int, key_width: int, max_model_len: int) -> tuple[int, int]:
    """Elements of the gathered keys and of the scores in the largest chunk."""
    longest = _num_blocks(max_model_len) * BLOCK_SIZE_TOKENS
    return max(KEYS, longest * key_width), max(SCORES, longest * num_heads)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE_TOKENS)
