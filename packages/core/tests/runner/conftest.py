"""Makes steps for the V2 runner's states."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_davinci.core.runner.buffers import leave_out_uva


def _step_of(slots: list[int], computed: list[int], lengths: list[int], prefill: list[int]) -> Any:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return SimpleNamespace(
        req_ids=[f"r{slot}" for slot in slots],
        num_reqs=len(slots),
        num_tokens=int(starts[-1]),
        idx_mapping_np=np.array(slots),
        num_computed_tokens_np=np.array(computed, dtype=np.int32),
        num_scheduled_tokens=np.array(lengths, dtype=np.int32),
        prefill_len_np=np.array(prefill, dtype=np.int32),
        query_start_loc_np=starts,
    )


@pytest.fixture
def step_of() -> Callable[..., Any]:
    """Makes a step's facts from slots, computed tokens, new tokens and prompt lengths."""
    leave_out_uva()
    return _step_of
