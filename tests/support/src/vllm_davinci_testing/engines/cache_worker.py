"""A worker extension that reads a rank's KV cache."""

from typing import Any

import numpy as np
import torch


class CacheWorker:
    """Named as an engine's worker extension by tests."""

    model_runner: Any

    def cached_rows(self, num_blocks: int) -> list[list[np.ndarray]]:
        """Reads the newest request's rows from its blocks; no other request may have run with it.

        Returns uint8 [num_blocks * block_size, bytes of a row] per layer and part of its cache.
        """
        runner = self.model_runner
        # Copied in the newest step, because the host drops its copy when the request ends.
        blocks = runner.block_tables.input_block_tables[0][0, :num_blocks].tolist()
        context = runner.compilation_config.static_forward_context
        caches = [context[name].kv_cache for name in sorted(context)]
        return [[_rows(part[blocks]) for part in cache.parts] for cache in caches]


def _rows(blocks: torch.Tensor) -> np.ndarray:
    """Converts [blocks, block_size, heads, size] into bytes [blocks * block_size, bytes]."""
    rows: np.ndarray = blocks.cpu().flatten(0, 1).flatten(1).contiguous().view(torch.uint8).numpy()
    return rows
