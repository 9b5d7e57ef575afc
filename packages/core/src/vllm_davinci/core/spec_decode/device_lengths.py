"""Lengths of a drafter's passes, for attention that reads them on the device."""

from dataclasses import replace

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


class DeviceLengths:
    """Holds the running pass's lengths at a constant address, where a graph reads them.

    Attention with lengths from the host does not need this.

    max_num_requests: most requests of a pass
    """

    def __init__(self, max_num_requests: int, device: torch.device) -> None:
        self._ends = torch.zeros(max_num_requests + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_num_requests, dtype=torch.int32, device=device)

    def hold(self, common: CommonAttentionMetadata, num_requests: int) -> CommonAttentionMetadata:
        """The metadata with its lengths stored here, padded with requests without rows.

        Copies on the current stream, after the work that has written the lengths.
        """
        own = min(common.num_reqs, common.seq_lens.shape[0])
        ends, lengths = self._ends[: num_requests + 1], self._lengths[:num_requests]
        ends[: own + 1].copy_(common.query_start_loc[: own + 1])
        lengths[:own].copy_(common.seq_lens[:own])
        if own < num_requests:
            ends[own + 1 :].copy_(common.query_start_loc[own : own + 1].expand(num_requests - own))
            lengths[own:].fill_(1)
        return replace(common, query_start_loc=ends, seq_lens=lengths)
