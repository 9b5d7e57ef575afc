"""Facts about a step and its batch that decide whether it is split."""

from dataclasses import dataclass

import numpy as np

from vllm_davinci.core.ubatch.prefix_order import CachedPrefixes


@dataclass(frozen=True)
class ScheduledStep:
    """A step as one DP rank would run it alone.

    query_lens:     [num_reqs], new tokens of each request, in batch order
    is_real:        it serves requests: no profile, warm-up or dummy run
    precedes_graph: it runs a size eagerly before its capture, to create what the capture needs
    """

    query_lens: np.ndarray
    is_real: bool
    precedes_graph: bool = False


@dataclass(frozen=True)
class BatchFacts:
    """Facts about the batch of a step that serves requests.

    can_be_cut: no input belongs to the step as a whole
    prefixes:   the requests' cached tokens; None without any
    """

    can_be_cut: bool
    prefixes: CachedPrefixes | None = None

    def cached_tokens(self, chosen: np.ndarray) -> int:
        """Tokens in the cache of the chosen requests. chosen: [num_reqs], bool"""
        return 0 if self.prefixes is None else int(self.prefixes.num_computed_tokens[chosen].sum())
