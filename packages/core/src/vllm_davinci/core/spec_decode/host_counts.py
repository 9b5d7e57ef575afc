"""Draft tokens that the host assumed accepted and the device rejected."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class RejectedDrafts:
    """Corrects a step that vLLM prepares as if all drafts had been accepted.

    Under asynchronous scheduling vLLM corrects only on the device, where it computes lengths and
    cache slots. Ours are computed on the host.

    counts: [max_num_reqs] int32, tokens that the batch counts as computed although they were
            rejected
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.counts = np.zeros(max_num_reqs, dtype=np.int32)

    @contextmanager
    def known(
        self, batch: Any, num_drafts: np.ndarray, tokens_of_step: Sequence[int]
    ) -> Iterator[np.ndarray]:
        """Inside, a step is prepared; yields the counts of its requests: [num_requests].

        batch:          vLLM's input batch
        num_drafts:     [rows of the previous step], drafts verified there
        tokens_of_step: likewise, number of tokens that each request got
        """
        counts = self.counts[: batch.num_reqs]
        counts[:] = count_rejected(
            batch.req_ids, batch.prev_req_id_to_index, num_drafts, tokens_of_step
        )
        # vLLM writes into this buffer after launching the forward, when a slow device may still
        # have to copy from it.
        shared = batch.num_computed_tokens_cpu_tensor
        batch.num_computed_tokens_cpu_tensor = shared.clone().pin_memory()
        try:
            yield counts
        finally:
            batch.num_computed_tokens_cpu_tensor = shared
            counts[:] = 0


def count_rejected(
    requests: Sequence[str],
    rows_before: dict[str, int],
    num_drafts: np.ndarray,
    tokens_of_step: Sequence[int],
) -> np.ndarray:
    """Rejected drafts of each request in the previous step: [num_requests] int32.

    requests:    of this step, in its order
    rows_before: request -> its row in the previous step
    """
    rejected = np.zeros(len(requests), dtype=np.int32)
    for row, request in enumerate(requests):
        before = rows_before.get(request)
        if before is not None and num_drafts[before] > 0:
            rejected[row] = num_drafts[before] + 1 - tokens_of_step[before]
    return rejected
