"""Drafter passes with graphs: selects a pass's graph and pads its metadata."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_davinci.core.spec_decode.device_lengths import DeviceLengths


@dataclass(frozen=True)
class DraftPass:
    """One pass over the drafter's model, with equally many rows per request.

    is_first: whether it reads the rows of the target's step; otherwise one new token per request
    """

    is_first: bool
    num_requests: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.query_len


class DraftPasses:
    """The captured passes of a drafter, and the forward that selects among them.

    first_query_len: rows of a request in a first pass of decodes
    runs:            is_first -> the function that captures and replays the pass
    block_table:     requests -> [requests, blocks] on the device, always in the same memory
    lengths:         lengths that attention reads on the device; None if the host has them
    """

    def __init__(
        self,
        model: torch.nn.Module,
        first_query_len: int,
        runs: Mapping[bool, Callable[..., Any]],
        block_table: Callable[[int], torch.Tensor],
        lengths: DeviceLengths | None = None,
    ) -> None:
        self._first_query_len = first_query_len
        self._runs = runs
        self._forward = model.forward
        self._block_table = block_table
        self._lengths = lengths
        self._sizes: list[int] = []  # requests, ascending
        self.planned: DraftPass | None = None  # the next pass; None for an eager one
        model.forward = self._run  # vLLM checks for the model's own class, and calls its `forward`

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        planned = self.planned
        run = self._forward if planned is None else self._runs[planned.is_first]
        return run(*args, **kwargs)

    def of_size(self, num_requests: int) -> list[DraftPass]:
        """The passes captured for a number of requests."""
        return [self._pass(is_first, num_requests) for is_first in self._runs]

    def use_sizes(self, sizes: Iterable[int]) -> None:
        """From now on replays steps of these numbers of requests, padding smaller ones."""
        self._sizes = sorted(sizes)

    def plan_first(self, common: CommonAttentionMetadata) -> DraftPass | None:
        """The graph of a step whose requests all have a decode's rows; None without one."""
        length = self._first_query_len
        is_uniform = (
            common.max_query_len == length and common.num_actual_tokens == common.num_reqs * length
        )
        return self._padded(True, common.num_reqs) if is_uniform else None

    def plan_next(self, num_requests: int) -> DraftPass | None:
        """The graph of a later pass, with one token per request; None without one."""
        return self._padded(False, num_requests)

    def metadata(
        self, planned: DraftPass, common: CommonAttentionMetadata, slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        """The metadata of a pass, padded to its graph's size with requests without rows.

        slots: [rows or more] int64, the drafter's slots of its rows; -1 in padding
        """
        assert common.seq_lens_cpu_upper_bound is not None
        ends = common.query_start_loc_cpu[: common.num_reqs + 1]
        lengths = common.seq_lens_cpu_upper_bound[: common.num_reqs]
        missing = planned.num_requests - common.num_reqs
        return replace(
            self._held(common, planned),
            query_start_loc_cpu=torch.cat([ends, ends[-1:].expand(missing)]),
            seq_lens_cpu_upper_bound=torch.cat(
                [lengths, lengths.new_full((missing,), planned.query_len)]
            ),
            num_reqs=planned.num_requests,
            num_actual_tokens=planned.num_tokens,
            block_table_tensor=self._block_table(planned.num_requests),
            slot_mapping=slots[: planned.num_tokens],
        )

    def dummy_metadata(self, planned: DraftPass, slots: torch.Tensor) -> CommonAttentionMetadata:
        """Metadata with as many requests as the graph holds, which read and write nothing."""
        count, length = planned.num_requests, planned.query_len
        ends = torch.arange(0, planned.num_tokens + 1, length, dtype=torch.int32)
        lengths = torch.full((count,), length, dtype=torch.int32)
        dummy = CommonAttentionMetadata(
            query_start_loc=ends.to(slots.device),
            query_start_loc_cpu=ends,
            seq_lens=lengths.to(slots.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=count,
            num_actual_tokens=planned.num_tokens,
            max_query_len=length,
            max_seq_len=length,
            block_table_tensor=self._block_table(count),
            slot_mapping=slots[: planned.num_tokens],
            causal=True,
        )
        return self._held(dummy, planned)

    def _held(self, common: CommonAttentionMetadata, planned: DraftPass) -> CommonAttentionMetadata:
        return common if self._lengths is None else self._lengths.hold(common, planned.num_requests)

    def _padded(self, is_first: bool, num_requests: int) -> DraftPass | None:
        place = bisect_left(self._sizes, num_requests)
        if is_first not in self._runs or place == len(self._sizes):
            return None
        return self._pass(is_first, self._sizes[place])

    def _pass(self, is_first: bool, num_requests: int) -> DraftPass:
        return DraftPass(is_first, num_requests, self._first_query_len if is_first else 1)


class CapturableDrafter(Protocol):
    """A drafter that replays the passes it has been given."""

    model: Any
    passes: DraftPasses | None

    def run_dummy_pass(self, planned: DraftPass, mode: CUDAGraphMode) -> None: ...


class DrafterToCapture(NamedTuple):
    """A drafter with passes that can be captured.

    query_len:   rows of a request in its first pass after a decode step
    block_table: requests -> [requests, blocks] on the device, always in the same memory
    lengths:     lengths that its attention reads on the device; None if the host has them
    """

    drafter: CapturableDrafter
    query_len: int
    block_table: Callable[[int], torch.Tensor]
    lengths: DeviceLengths | None
