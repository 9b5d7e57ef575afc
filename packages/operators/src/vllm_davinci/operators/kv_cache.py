"""Blocks of the KV cache."""

from torch import Tensor


def copy_kv_blocks(kv_caches: list[Tensor], block_pairs: Tensor) -> None:
    """Copies blocks inside every cache, pair after pair.

    kv_caches:   each [num_blocks, ...], contiguous; written in place
    block_pairs: [num_pairs, 2], int64, on the host: from, to
    """
    for cache in kv_caches:
        for source, target in block_pairs.tolist():
            cache[target] = cache[source]


def scatter_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Writes each token's row to its slot and returns the cache.

    cache: [num_blocks, block_size, ...], contiguous, written in place
    slots: [num_tokens], block * block_size + offset; negative writes nothing
    rows:  [num_tokens, ...]
    """
    written = slots.long() >= 0
    cache.view(-1, *cache.shape[2:])[slots.long()[written]] = rows[written].to(cache.dtype)
    return cache
