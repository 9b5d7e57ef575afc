"""Facts about a step and its batch that decide whether it is split."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_davinci.core.ubatch.prefix_order import BlockIds, CachedPrefixes


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
    prefixes:   the requests' cached tokens; None: nothing
    """

    can_be_cut: bool
    prefixes: CachedPrefixes | None = None

    @classmethod
    def of(
        cls,
        batch: Any,
        requests: Mapping[str, Any],
        model: object,
        model_kwargs: Mapping[str, Any],
    ) -> "BatchFacts":
        """The facts about vLLM's input batch.

        requests:     by name, those of the batch included
        model:        a model whose rows of images or videos can be found in any cut of a step
                      declares it: `splits_multimodal_steps`
        model_kwargs: the model's inputs for the whole step
        """
        splits_multimodal_steps = getattr(model, "splits_multimodal_steps", False)
        has_multimodal = any(requests[name].mm_features for name in batch.req_ids)
        return cls(
            can_be_cut=(splits_multimodal_steps or not has_multimodal) and not model_kwargs,
            prefixes=CachedPrefixes(
                [
                    BlockIds(table.get_numpy_array(), table.block_size)
                    for table in batch.block_table.block_tables
                ],
                batch.num_computed_tokens_cpu[: batch.num_reqs],
            ),
        )
