"""Sizes of captured steps, in tokens, derived from a configuration."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_davinci.core.errors import ConfigurationError


class Sizes(NamedTuple):
    """Ascending sizes, and notes about them for the user."""

    sizes: list[int]
    notes: list[str]


def doubling_sizes(first: int, last: int) -> list[int]:
    """first, 2 * first, 4 * first, ... below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def graph_batch_sizes(
    asked: Sequence[int],
    doubling: bool,
    *,
    max_num_seqs: int,
    query_len: int,
    tp_size: int,
    rounds_to_tp: bool,
    max_num_batched_tokens: int,
) -> Sizes:
    """Derives the sizes from torchair_graph_config.

    asked:        requests per step, in any order; an empty list means 1 and max_num_seqs
    doubling:     double from max(4, tp_size) instead of using `asked`
    query_len:    tokens per decoding request: more than one with speculation
    rounds_to_tp: round sizes, except the largest, up to multiples of tp_size, because experts' rows
                  are sliced over TP ranks
    Raises ConfigurationError for a size that is not positive, or if no size is left.
    """
    notes: list[str] = []
    if wrong := [size for size in asked if size < 1]:
        raise ConfigurationError(
            f"torchair_graph_config.graph_batch_sizes has {wrong}: sizes are requests per step, 1 "
            "or more."
        )
    if doubling:
        asked = doubling_sizes(max(4, tp_size), max_num_seqs)
    requests = sorted({size for size in asked if size <= max_num_seqs})
    if dropped := sorted({*asked} - {*requests}):
        notes.append(
            f"graph_batch_sizes {dropped} are dropped: no step has more than {max_num_seqs} "
            "requests (--max-num-seqs)"
        )
    if not requests:
        if asked:
            notes.append(f"graph_batch_sizes are [1, {max_num_seqs}]: no given size is left")
        requests = [1]
    requests = sorted({*requests, max_num_seqs})
    sizes = {size * query_len for size in requests}
    if rounds_to_tp:
        most = max_num_seqs * query_len  # vLLM's largest decode step
        sizes = {min(-(-size // tp_size) * tp_size, most) for size in sizes}
    kept = sorted(size for size in sizes if size <= max_num_batched_tokens)
    if lost := sorted(sizes - {*kept}):
        notes.append(
            f"graph sizes {lost} are dropped: a step has {max_num_batched_tokens} tokens at most "
            "(--max-num-batched-tokens)"
        )
    if not kept:
        raise ConfigurationError(
            f"No graph size is left of {sorted(sizes)}: a step has {max_num_batched_tokens} tokens "
            "at most. Raise --max-num-batched-tokens, or start with --enforce-eager."
        )
    return Sizes(kept, notes)


def sample_evenly(sizes: Iterable[int], count: int) -> list[int]:
    """`count` of the sizes, ascending: always the last, and with two or more the first."""
    given = sorted(sizes)
    if count >= len(given):
        return given
    if count == 1:
        return given[-1:]
    step = (len(given) - 1) / (count - 1)
    return [given[round(index * step)] for index in range(count)]
