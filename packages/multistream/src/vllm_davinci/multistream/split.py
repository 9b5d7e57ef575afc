"""Splits a step's tokens into ubatches.

A step is a list of requests in batch order, decodes first, with the number of new tokens (the query
length) of each. A ubatch is a contiguous range of the step's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch

from vllm_davinci.multistream.errors import SplitError

# "request" never cuts inside a request; "token" cuts into equal parts, but not inside a decode of
# several tokens (drafts).
CutMode = Literal["request", "token"]


@dataclass(frozen=True)
class UBatch:
    """A part of a step.

    tokens:   its range of the step's tokens
    requests: its range of the step's requests, with at least one token each
    """

    tokens: slice
    requests: slice

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)

    @property
    def num_requests(self) -> int:
        return int(self.requests.stop - self.requests.start)


@dataclass(frozen=True)
class Split:
    """A step split into ubatches that cover each token once."""

    ubatches: tuple[UBatch, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """First token of the second and each later ubatch."""
        return tuple(int(part.tokens.start) for part in self.ubatches[1:])

    def slice(self, tensor: torch.Tensor | None, dim: int = 0) -> list[torch.Tensor | None]:
        """Each ubatch's rows of `tensor` along `dim`, as views; None stays None.

        Rows after the step's tokens (padding) go to the last ubatch.
        """
        if tensor is None:
            return [None] * len(self.ubatches)
        ends = [*self.cuts, tensor.shape[dim]]
        return [tensor.narrow(dim, a, b - a) for a, b in pairwise([0, *ends])]

    @staticmethod
    def merge(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The inverse of `slice`."""
        return torch.cat(list(parts), dim)


def choose_cuts(
    query_lens: Sequence[int],
    *,
    num_ubatches: int = 2,
    mode: CutMode = "request",
    imbalance_ratio: float = 0.1,
    alignment: int = 1,
    first_share: float | None = None,
    decode_query_len: int = 1,
) -> list[int]:
    """The tokens to cut at, or [] if there is no legal cut.

    query_lens:      new tokens of each request, in batch order, each at least 1
    imbalance_ratio: largest distance of a cut from its target, as a fraction of all tokens
                     ("request")
    alignment:       cuts are multiples of it ("token")
    first_share:     first ubatch's share of all tokens; the others are equal. None: all are
    decode_query_len: maximum new tokens of a decode, which is never divided
    Raises SplitError if there are fewer tokens than ubatches or an option is out of range.
    """
    total = sum(query_lens)
    if num_ubatches < 2:
        raise SplitError(f"num_ubatches={num_ubatches}: a split needs at least 2.")
    if num_ubatches > total:
        raise SplitError(f"{total} tokens cannot fill {num_ubatches} ubatches.")
    if alignment < 1 or not 0 <= imbalance_ratio <= 1:
        raise SplitError(
            f"alignment={alignment}, imbalance_ratio={imbalance_ratio}: expected at least 1, and "
            "0 to 1."
        )
    targets = [total * i // num_ubatches for i in range(1, num_ubatches)]
    if first_share is not None:
        if not 0 < first_share < 1:
            raise SplitError(f"first_share={first_share}: expected between 0 and 1.")
        first = round(total * first_share)
        rest = total - first
        targets = [first + rest * i // (num_ubatches - 1) for i in range(num_ubatches - 1)]
    decode_only = all(length == 1 for length in query_lens)
    if mode == "token":
        cuts = [round(target / alignment) * alignment for target in targets]
        cuts = [_outside_decodes(query_lens, cut, decode_query_len) for cut in cuts]
    elif decode_only:
        cuts = targets
    else:
        ends = list(accumulate(query_lens))
        cuts = [_boundary(ends, target, total * imbalance_ratio) for target in targets]
    if any(b <= a for a, b in pairwise([0, *cuts, total])):
        return []  # a part would be empty
    return cuts


def _boundary(ends: Sequence[int], target: int, tolerance: float) -> int:
    """The request boundary nearest to `target`; 0 if none lies within `tolerance`."""
    at = next(i for i, end in enumerate(ends) if end >= target)
    before = ends[at - 1] if at > 0 else 0
    if abs(ends[at] - target) < tolerance:
        return ends[at]
    if abs(before - target) < tolerance:
        return before
    return 0


def _outside_decodes(query_lens: Sequence[int], cut: int, decode_query_len: int) -> int:
    """The cut, or the nearer end of a decode that it would divide."""
    begin = 0
    for length in query_lens:
        end = begin + length
        if begin < cut < end and length <= decode_query_len:
            return begin if cut - begin < end - cut else end
        begin = end
    return cut


def split_at(query_lens: Sequence[int], cuts: Sequence[int]) -> Split:
    """The ubatches between ascending cuts. A divided request is in both parts."""
    ends = list(accumulate(query_lens))
    total = ends[-1] if ends else 0
    if not cuts or any(b <= a for a, b in pairwise([0, *cuts, total])):
        raise SplitError(f"cuts {list(cuts)} do not divide {total} tokens into non-empty parts.")
    parts = []
    for first, last in pairwise([0, *cuts, total]):
        begin = next(i for i, end in enumerate(ends) if end > first)
        end = next(i for i, end in enumerate(ends) if end >= last) + 1
        parts.append(UBatch(slice(first, last), slice(begin, end)))
    return Split(tuple(parts))
