"""Log-probabilities of tokens, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/sample/{logprob,prompt_logprob}.py,
v1/worker/gpu/metrics/logits.py), with the same parameters without `_ptr`. Nothing here reads from
the device. L rows of logits, V entries of the vocabulary, R slots of requests.
"""

from typing import Any

import torch

from vllm_davinci.core.triton_kernels.inputs import request_of


def topk_log_softmax(
    output: torch.Tensor,
    logits: torch.Tensor,
    logits_stride: int,
    topk_ids: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **_: Any,
) -> None:
    """Writes the log-probabilities of some tokens, computed in fp32.

    output: [L, topk] fp32; logits: [L, V], any float; topk_ids: [L, topk] int64
    """
    values = logits.to(torch.float32)
    values = values - values.amax(dim=1, keepdim=True)
    total = values.exp().sum(dim=1, keepdim=True).log_()
    output.copy_(values.gather(1, topk_ids[:, :topk]) - total)


def ranks(
    output: torch.Tensor,
    logits: torch.Tensor,
    logits_stride: int,
    token_ids: torch.Tensor,
    vocab_size: int,
    **_: Any,
) -> None:
    """Writes the number of logits that are at least the row's token's: [L] int64. token_ids: [L]"""
    of_token = logits.gather(1, token_ids.to(torch.int64).unsqueeze(1))
    output.copy_((logits >= of_token).sum(dim=1))


def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping: torch.Tensor,
    num_per_req_token_ids: torch.Tensor,
    per_req_token_ids: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int = 0,
    **_: Any,
) -> None:
    """Writes the requested tokens: the sampled one, then the request's own tokens or the
    likeliest ones.

    out_token_ids:         [L, 1 + columns] int64, zero-initialized
    out_valid_mask:        likewise, bool: which of them are requested
    sampled_token_ids:     [L] int64; topk_indices: [L, NUM_TOPK] int32, anything if NUM_TOPK is 0
    num_per_req_token_ids: [R] int32; per_req_token_ids: [R, most] int32
    """
    num_columns = out_token_ids.shape[1] - 1
    columns = torch.arange(num_columns, device=out_token_ids.device, dtype=torch.int32)
    count = num_per_req_token_ids.index_select(0, expanded_idx_mapping).unsqueeze(1)
    own = _columns(per_req_token_ids.index_select(0, expanded_idx_mapping), num_columns)
    has_own = count > 0
    valid = torch.where(has_own, columns < count, columns < NUM_TOPK)
    tokens = own
    if NUM_TOPK:
        tokens = torch.where(has_own, own, _columns(topk_indices[:, :NUM_TOPK], num_columns))
    out_token_ids[:, 0].copy_(sampled_token_ids)
    out_token_ids[:, 1:].copy_(tokens * valid)
    out_valid_mask[:, :1].fill_(True)
    out_valid_mask[:, 1:].copy_(valid)


def _columns(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` columns, padded with zeros."""
    missing = count - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (0, missing)) if missing > 0 else tokens[:, :count]


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    **_: Any,
) -> None:
    """Writes the token after each row of the step: [T] int64, of rows that belong to a request."""
    num_reqs, num_rows = idx_mapping.shape[0], prompt_logprobs_token_ids.shape[0]
    starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
    rows = torch.arange(num_rows, device=idx_mapping.device, dtype=torch.int64)
    request = request_of(ends, num_rows)
    slot = idx_mapping.index_select(0, request)
    computed = num_computed_tokens.index_select(0, slot)
    position = rows + 1 + computed - starts.index_select(0, request)
    position = position.clamp(max=all_token_ids.shape[1] - 1)
    places = slot * all_token_ids_stride + position
    tokens = all_token_ids.view(-1).index_select(0, places)
    prompt_logprobs_token_ids.copy_(tokens)


def num_nans(
    logits: torch.Tensor, logits_stride: int, num_nans: torch.Tensor, vocab_size: int, **_: Any
) -> None:
    """Writes the number of NaNs in each row of logits [L, V]: [L] int32."""
    num_nans.copy_(logits.ne(logits).sum(dim=1))
