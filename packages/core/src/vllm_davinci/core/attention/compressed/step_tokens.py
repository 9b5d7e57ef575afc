"""The tokens of one step: their requests, and which of them complete a group."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch


class Tokens(NamedTuple):
    """Some tokens of a step.

    rows:       [n], int64: rows in the step
    requests:   [n], int64: rows of their requests in block tables
    positions:  [n], int64: position of each in its request
    is_written: [n]: whether each has rows to write; None: all of them. False in a graph's padding
    """

    rows: torch.Tensor
    requests: torch.Tensor
    positions: torch.Tensor
    is_written: torch.Tensor | None = None


class Span(NamedTuple):
    """New tokens of one request, on the host.

    rows: in the step; request: row in block tables; end: the request's tokens up to the last one
          here
    """

    rows: slice
    request: int
    end: int


@dataclass
class StepTokens:
    """All tokens of a step, laid out on the host.

    num_tokens: real tokens; later rows of the step are padding
    spans:      one for each request with new tokens
    device:     of the tensors
    in_graph:   all sizes are constants of the graph, and lengths are on the device alone
    num_requests: of a graph, padding included; each has as many tokens
    """

    num_tokens: int
    spans: list[Span]
    device: torch.device
    in_graph: bool = False
    num_requests: int = 0
    _by_ratio: dict[int, Tokens] = field(default_factory=dict)
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of_lengths(
        cls, starts: list[int], seq_lens: list[int], device: torch.device
    ) -> "StepTokens":
        """starts: first row of each request, then all rows; seq_lens: total tokens of each"""
        bounds = zip(starts, starts[1:], seq_lens, strict=False)
        spans = [
            Span(slice(start, stop), request, end)
            for request, (start, stop, end) in enumerate(bounds)
            if stop > start
        ]
        return cls(spans[-1].rows.stop if spans else 0, spans, device)

    @classmethod
    def of_graph(
        cls, positions: torch.Tensor, slots: torch.Tensor, num_requests: int
    ) -> "StepTokens":
        """Lays out the tokens of a graph: the same number for each request, padding included.

        positions, slots: [num_tokens], int64; a slot of padding is negative
        """
        num_tokens, device = len(positions), positions.device
        rows = torch.arange(num_tokens, device=device)
        requests = rows // (num_tokens // num_requests)
        tokens = Tokens(rows, requests, positions, slots >= 0)
        return cls(num_tokens, [], device, True, num_requests, {1: tokens})

    @property
    def longest(self) -> int:
        """Total tokens of the longest request."""
        return max((span.end for span in self.spans), default=0)

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the first layer's result of `make` for this key; it must not be written to."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def num_complete(self, ratio: int) -> torch.Tensor:
        """Number of complete groups of `ratio` tokens that each token sees: [num_tokens], int64.

        0 for padding, at any position: its blocks are null blocks, which hold no rows.
        """

        def counted() -> torch.Tensor:
            tokens = self.all
            counts = (tokens.positions + 1) // ratio
            return counts if tokens.is_written is None else counts * tokens.is_written

        found: torch.Tensor = self.shared(("complete", ratio), counted)
        return found

    @property
    def all(self) -> Tokens:
        return self.closing(1)

    def closing(self, ratio: int) -> Tokens:
        """Tokens that complete a group of `ratio` tokens; may be empty. In a graph: all tokens, and
        `is_written` marks these."""
        if ratio not in self._by_ratio:
            self._by_ratio[ratio] = self._closing(ratio)
        return self._by_ratio[ratio]

    def _closing(self, ratio: int) -> Tokens:
        if self.in_graph:
            every = self.all
            assert every.is_written is not None
            is_last = (every.positions + 1) % ratio == 0
            return every._replace(is_written=every.is_written & is_last)
        parts = []
        for span in self.spans:
            positions = np.arange(span.end - span.rows.stop + span.rows.start, span.end)
            rows = np.arange(span.rows.start, span.rows.stop)
            requests = np.full_like(rows, span.request)
            parts.append(np.stack([rows, requests, positions])[:, (positions + 1) % ratio == 0])
        joined = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), dtype=np.int64)
        # A selection may be strided; the host would wait for the copy of a strided tensor.
        on_host = torch.from_numpy(np.ascontiguousarray(joined))
        if self.device.type != "cpu":
            on_host = on_host.pin_memory()
        return Tokens(*on_host.to(self.device, non_blocking=True).unbind())
