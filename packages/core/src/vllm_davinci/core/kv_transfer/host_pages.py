"""Pinned host memory from which KV cache pages are sent and into which they are received."""

from collections.abc import Mapping, Sequence

import torch
import torch_npu

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.kv_transfer.seals import SEAL_BYTES, page_seals

_WORD_BYTES = 8


class HostPages:
    """One layer's blocks on the host, under the device's block numbers.

    A page holds the block's part of each region of the device's cache (keys, then values; with MLA
    kv_c, then k_pe) and ends with its checksum.

    parts: the layer's cache, of any dtype, each contiguous, block after block
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._regions = [part.view(num_blocks, -1).view(torch.int8) for part in parts]
        self._page_bytes = sum(region.shape[1] for region in self._regions)
        assert self._page_bytes % _WORD_BYTES == 0, f"pages of {self._page_bytes} bytes"
        self.rows = _pinned(num_blocks, self._page_bytes + SEAL_BYTES)
        """int8 [num_blocks, page_bytes + SEAL_BYTES]"""
        self._words = self.rows.view(torch.int64)
        self._num_words = self._page_bytes // _WORD_BYTES

    def store(self, blocks: Sequence[int]) -> None:
        """Starts to copy blocks from the device, on the current stream."""
        for block in blocks:
            start = 0
            for region in self._regions:
                end = start + region.shape[1]
                self.rows[block, start:end].copy_(region[block], non_blocking=True)
                start = end

    def load(self, blocks: Sequence[int]) -> None:
        """Starts to copy blocks to the device, on the current stream."""
        for block in blocks:
            start = 0
            for region in self._regions:
                end = start + region.shape[1]
                region[block].copy_(self.rows[block, start:end], non_blocking=True)
                start = end

    def seal(self, blocks: torch.Tensor, digests: torch.Tensor) -> None:
        """Writes the checksums of pages whose copies have completed.

        blocks:  int64 [num_pages]
        digests: int64 [num_pages], of the prefix that ends with each block
        """
        self._words[blocks, self._num_words] = self._seals(blocks, digests)

    def sealed(self, blocks: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
        """Checks that each page is complete and holds these tokens: bool [num_pages]."""
        return self._words[blocks, self._num_words] == self._seals(blocks, digests)

    def _seals(self, blocks: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
        sums = [self._words[block : block + 1, : self._num_words] for block in blocks.tolist()]
        return torch.cat([page_seals(page, digests[i : i + 1]) for i, page in enumerate(sums)])


def store_sealed(
    pages: Sequence[HostPages],
    blocks: Mapping[str, Sequence[int]],
    digests: Mapping[str, Sequence[int]],
) -> None:
    """Copies requests' blocks of all layers to the host and adds checksums. The host waits for it.

    blocks, digests: by request; digests of the prefixes that end with each block
    """
    if not blocks:
        return
    for of_request in blocks.values():
        for each in pages:
            each.store(of_request)
    torch_npu.npu.current_stream().synchronize()
    for name, of_request in blocks.items():
        expected = torch.tensor(digests[name])
        for each in pages:
            each.seal(torch.tensor(of_request), expected)


def are_sealed(pages: Sequence[HostPages], blocks: Sequence[int], digests: Sequence[int]) -> bool:
    """True if a request's blocks of all layers are complete and hold its tokens."""
    if len(blocks) != len(digests):
        return False
    of_blocks, expected = torch.tensor(blocks), torch.tensor(digests)
    return all(bool(each.sealed(of_blocks, expected).all()) for each in pages)


def _pinned(num_rows: int, row_bytes: int) -> torch.Tensor:
    try:
        return torch.zeros(num_rows, row_bytes, dtype=torch.int8, pin_memory=True)
    except RuntimeError as error:
        raise ConfigurationError(
            f"--kv-transfer-config needs {num_rows * row_bytes / 2**30:.2f} GiB of pinned memory "
            "for each layer, which the host does not have: disaggregation keeps a copy of the "
            "whole KV cache there. Give a smaller --kv-cache-memory-bytes or "
            "--gpu-memory-utilization."
        ) from error
