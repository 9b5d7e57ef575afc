"""Sparse MLA with a learned sink per head, composed of torch's operators.

npu_sparse_flash_attention takes no sinks on A2 and A3, and returns no log-sum-exp over a paged
cache.
"""

import torch

from vllm_davinci.core.attention.gathered import queries_at_once
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.sparse_metadata import SparseMLAMetadata


def attend_with_sinks(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: MLACache,
    metadata: SparseMLAMetadata,
    chosen: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Lets each query attend, in fp32, to the chosen rows of its request and to its head's sink.

    ql_nope: [num_tokens, num_heads, kv_lora_rank]; q_pe: [num_tokens, num_heads, rope]
    chosen:  [num_tokens, 1, width], int32: positions in the request, then -1
    sinks:   [num_heads], fp32: scores without a value
    Returns a new tensor like ql_nope.
    """
    out, chosen = torch.empty_like(ql_nope), chosen.squeeze(1)
    num_heads, width = ql_nope.shape[1], chosen.shape[1]
    at_once = queries_at_once(num_heads, cache.kv_c.shape[-1] + cache.k_pe.shape[-1], width)
    for start in range(0, len(out), at_once):
        part = slice(start, min(start + at_once, len(out)))
        hidden = chosen[part] < 0
        rows = metadata.rows_of_positions(chosen[part], cache.kv_c.shape[1], part).flatten()
        shape = len(hidden), width, -1
        kv_c, k_pe = (
            each.flatten(0, 2).index_select(0, rows).float().view(shape)
            for each in (cache.kv_c, cache.k_pe)
        )
        scores = torch.bmm(ql_nope[part].float(), kv_c.transpose(1, 2))
        scores.add_(torch.bmm(q_pe[part].float(), k_pe.transpose(1, 2))).mul_(scale)
        scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        last = sinks.view(1, -1, 1).expand(len(scores), -1, -1)
        weights = torch.cat([scores, last], dim=-1).softmax(dim=-1)[..., :width]
        out[part] = torch.bmm(weights, kv_c).to(out.dtype)
    return out
