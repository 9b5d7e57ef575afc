"""Checks that a cut of a step keeps cached prefixes exact.

Requests of one step may share cache blocks: the scheduler lets a request hit a block that another
one fills in the same step. A whole step writes all keys and values of a layer before any token
attends. In a cut step, the ubatches run layer by layer in order, so the only error is a token
before a cut that reads a block filled by a token after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BlockIds(NamedTuple):
    """One KV cache group's block table on the host.

    table:      [>= num_reqs, max_blocks], block of each request at each block index
    block_size: tokens per block
    """

    table: np.ndarray
    block_size: int


class CachedPrefixes(NamedTuple):
    """The cache of a step's requests before the step, in batch order.

    groups:              block table of each KV cache group
    num_computed_tokens: [num_reqs], tokens in the cache
    """

    groups: Sequence[BlockIds]
    num_computed_tokens: np.ndarray


def is_in_order(prefixes: CachedPrefixes, query_lens: np.ndarray, cuts: Sequence[int]) -> bool:
    """True if no token before a cut reads a block that a token at or after the cut fills.

    query_lens: [num_reqs], new tokens of each request, in batch order
    cuts:       tokens of the step at which ubatches begin
    """
    groups, num_computed_tokens = prefixes
    ends = np.cumsum(query_lens)
    starts = ends - query_lens
    for cut in cuts:
        readers = np.flatnonzero((starts < cut) & (num_computed_tokens > 0))
        writers = np.flatnonzero(ends > cut)
        if readers.size == 0 or writers.size == 0:
            continue
        before_cut = np.maximum(cut - starts[writers], 0)
        first = num_computed_tokens[writers] + before_cut
        last = num_computed_tokens[writers] + query_lens[writers]
        for table, block_size in groups:
            written = _blocks(table, writers, first // block_size, -(-last // block_size))
            # Only whole blocks: a prefix ends within a block that belongs to the reader alone.
            whole = num_computed_tokens[readers] // block_size
            read = _blocks(table, readers, np.zeros_like(whole), whole)
            if np.isin(read, written).any():
                return False
    return True


def _blocks(
    table: np.ndarray, requests: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Ids of the blocks [first, stop) of each request, in one array."""
    columns = np.arange(int(stop.max()))
    return table[requests, : columns.size][(columns >= first[:, None]) & (columns < stop[:, None])]
