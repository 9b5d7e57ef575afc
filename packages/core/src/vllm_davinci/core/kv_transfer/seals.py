"""Checksums of transferred KV pages: each proves that the page is complete and has these tokens.

A page may be read late, while or after the prefill engine gives its block to another request. The
transfer itself succeeds then.
"""

import hashlib
from array import array
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Keeps the following pages aligned for DMA.
SEAL_BYTES = 64
_DIGEST_BYTES = 8


def prefix_digests(request: "Request", block_size: int) -> list[int]:
    """Digest of all tokens up to the end of each block of a prompt, as signed 64-bit integers.

    block_size: tokens per block; the last one may be partial
    """
    # Not read for requests without token ids, which the configuration refuses.
    tokens = request.prompt_token_ids or []
    digest = hashlib.sha256((request.cache_salt or "").encode())
    digests = []
    for start in range(0, len(tokens), block_size):
        digest.update(array("q", tokens[start : start + block_size]).tobytes())
        first = digest.digest()[:_DIGEST_BYTES]
        digests.append(int.from_bytes(first, "little", signed=True))
    return digests


def page_seals(pages: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
    """Checksums of pages: the wrapping sum of a page's 64-bit words and its prefix's digest.

    pages:   int64 [num_pages, words], on the host
    digests: int64 [num_pages]
    Returns int64 [num_pages].
    """
    return pages.sum(dim=1) + digests
