"""Writes a step's tokens, one per request, into the batch at once.

vLLM writes them request by request, which is the longest part of its sampling.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.outputs import LogprobsLists, SamplerOutput

from vllm_davinci.core.sampling.newest_tokens import PLACEHOLDER


def gets_one_token_each(batch: Any, output: SamplerOutput, discarded: np.ndarray) -> bool:
    """True if every request of vLLM's input batch gets exactly one token and keeps it.

    discarded: [num_requests], bool: requests still in their prompt, whose tokens are ignored
    """
    return bool(
        not envs.VLLM_COMPUTE_NANS_IN_LOGITS
        and output.sampled_token_ids.shape == (batch.num_reqs, 1)
        and not np.count_nonzero(discarded)
    )


def record(
    batch: Any,
    requests: Mapping[str, Any],
    output: SamplerOutput,
    to_host: Callable[[torch.Tensor], list[list[int]]] | None,
) -> tuple[list[list[int]], LogprobsLists | None]:
    """Writes the newest token of each request of vLLM's input batch.

    output:  its tokens are [num_requests, 1]
    to_host: waits for tokens and copies them to the host; None if they stay on the device, from
             where the next step reads them: placeholders are written
    Returns the tokens and their log-probabilities; [] and None if the host does not know them.
    """
    sampled = output.sampled_token_ids
    if to_host is None:
        batch.prev_sampled_token_ids = sampled
        batch.prev_req_id_to_index = batch.req_id_to_index.copy()
        _append(batch, requests, [PLACEHOLDER] * batch.num_reqs)
        return [], None
    with gpu_sync_allowed():
        tokens = to_host(sampled)
        logprobs = None if output.logprobs_tensors is None else output.logprobs_tensors.tolists()
    _append(batch, requests, [token for (token,) in tokens])
    return tokens, logprobs


def _append(batch: Any, requests: Mapping[str, Any], tokens: list[int]) -> None:
    """Appends one token to each request, in batch order."""
    ends = batch.num_tokens_no_spec[: batch.num_reqs]
    rows = np.arange(batch.num_reqs)
    batch.token_ids_cpu[rows, ends] = tokens
    batch.is_token_ids[rows, ends] = True
    ends += 1
    for name, token in zip(batch.req_ids, tokens, strict=True):
        requests[name].output_token_ids.append(token)
