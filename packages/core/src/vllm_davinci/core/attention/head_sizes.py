"""Sizes and numbers of heads, dtypes and batch sizes that attention supports, found by asking.

They depend on the CANN release and on the chip, and the documents of releases differ (8.5: 64 and
128; 9.0: also others up to 256 with grouped heads). The operator checks sizes before it launches
anything, so one call with single tokens answers before weights are loaded.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from vllm_davinci.core.attention.masks import compressed_causal_mask
from vllm_davinci.core.device import fused_attention
from vllm_davinci.core.device.refusals import refusal_of
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import UnsupportedFeatureError

# Padded head sizes to try, smallest first. Padding is zero: it adds nothing to a score, and its
# value columns are cut off.
_PADDED_SIZES = (64, 128, 192, 256)
# Query heads that MLA over rows of the cache supports. Source: the operators' documentation,
# constraints of query_rope with heads of 512. Other numbers are not tried, as a release may accept
# them without being documented for them.
_MLA_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


@functools.cache
def paged_head_size(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    sparse_mode: int,
    has_sinks: bool = False,
) -> int:
    """Smallest supported head size for attention over a paged cache: `head_size`, or a padded one.

    has_sinks: attention sinks of `dtype` are passed
    Raises UnsupportedFeatureError if no size is supported with this dtype.
    """
    return _taken_size(
        lambda size: refusal_of(
            lambda: _attend_to_one_block(
                num_heads, num_kv_heads, size, dtype, sparse_mode, has_sinks=has_sinks
            )
        ),
        head_size,
        f"{num_heads} query heads over {num_kv_heads} key-value heads of {head_size} entries in "
        f"{_name(dtype)}, over a paged cache{' with attention sinks' * has_sinks}",
    )


@functools.cache
def dense_head_size(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, sparse_mode: int
) -> int:
    """Like paged_head_size, for attention over the batch itself."""
    return _taken_size(
        lambda size: refusal_of(
            lambda: _attend_to_itself(num_heads, num_kv_heads, size, size, dtype, sparse_mode)
        ),
        head_size,
        f"{num_heads} query heads over {num_kv_heads} key-value heads of {head_size} entries in "
        f"{_name(dtype)}",
    )


@functools.cache
def mla_head_sizes(
    num_heads: int, nope: int, rope: int, value: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Head sizes to call MLA's prefill with: the part without position, and the values.

    nope, rope, value: the model's sizes. Returns (nope, value), or the padded (128, 128), which the
    operator supports with separate rotary parts.
    Raises UnsupportedFeatureError if neither is supported with this dtype.
    """

    def refusal(nope: int, value: int) -> str | None:
        rope_size = rope if nope == value else 0
        size = nope if rope_size else nope + rope
        return refusal_of(
            lambda: _attend_to_itself(num_heads, num_heads, size, value, dtype, 3, rope_size)
        )

    said = refusal(nope, value)
    if said is None:
        return nope, value
    padded = 128
    if max(nope, value) <= padded and refusal(padded, padded) is None:
        return padded, padded
    raise _unsupported(
        f"{num_heads} heads of {nope} + {rope} entries with values of {value} in {_name(dtype)}",
        f"padded to {padded} + {rope} and {padded}" if max(nope, value) <= padded else None,
        said,
    )


@functools.cache
def require_requests(
    num_requests: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    sparse_mode: int,
    is_paged: bool = True,
) -> None:
    """Raises UnsupportedFeatureError if a step of `num_requests` requests is not supported.

    head_size, dtype: supported for one request
    is_paged:         attention over a paged cache; False: over the batch itself
    """

    def attend() -> None:
        heads = (num_heads, num_kv_heads, head_size)
        if is_paged:
            _attend_to_one_block(*heads, dtype, sparse_mode, num_requests)
        else:
            _attend_to_itself(*heads, head_size, dtype, sparse_mode, num_requests=num_requests)

    said = refusal_of(attend)
    if said is not None:
        raise _too_many(num_requests, said)


@functools.cache
def mla_decode_heads(
    num_heads: int, kv_lora_rank: int, rope: int, dtype: torch.dtype, num_requests: int = 1
) -> int:
    """Number of heads to call MLA over the cache with: `num_heads`, or the smallest padded one.

    num_requests: most requests of a step
    Raises UnsupportedFeatureError if no number of heads, or not this number of requests, is
    supported with this dtype.
    """

    def attend(heads: int, requests: int) -> None:
        new = functools.partial(torch.zeros, dtype=dtype, device="npu")
        rows = new(1, BLOCK_SIZE_TOKENS, kv_lora_rank)
        torch_npu.npu_fused_infer_attention_score(
            new(requests, heads, kv_lora_rank),
            rows,
            rows,
            query_rope=new(requests, heads, rope),
            key_rope=new(1, BLOCK_SIZE_TOKENS, rope),
            **_one_token_each(requests),
            num_heads=heads,
            num_key_value_heads=1,
            input_layout="TND_NTD",
            block_size=BLOCK_SIZE_TOKENS,
        )

    heads = _taken_heads(
        lambda heads: refusal_of(lambda: attend(heads, 1)),
        num_heads,
        f"cached rows of {kv_lora_rank} + {rope} in {_name(dtype)}",
    )
    if (said := refusal_of(lambda: attend(heads, num_requests))) is not None:
        raise _too_many(num_requests, said)
    return heads


@functools.cache
def sparse_mla_heads(num_heads: int, kv_lora_rank: int, rope: int, dtype: torch.dtype) -> int:
    """Like mla_decode_heads, for MLA over chosen tokens and any number of requests."""

    def attend(heads: int) -> None:
        new = functools.partial(torch.zeros, dtype=dtype, device="npu")
        one = torch.ones(1, dtype=torch.int32, device="npu")
        rows = new(1, BLOCK_SIZE_TOKENS, 1, kv_lora_rank)
        torch_npu.npu_sparse_flash_attention(
            new(1, heads, kv_lora_rank),
            rows,
            rows,
            torch.zeros(1, 1, 1, dtype=torch.int32, device="npu"),
            1.0,
            block_table=torch.zeros(1, 1, dtype=torch.int32, device="npu"),
            actual_seq_lengths_query=one,
            actual_seq_lengths_kv=one,
            query_rope=new(1, heads, rope),
            key_rope=new(1, BLOCK_SIZE_TOKENS, 1, rope),
            layout_query="TND",
            layout_kv="PA_BSND",
            attention_mode=2,
        )

    return _taken_heads(
        lambda heads: refusal_of(lambda: attend(heads)),
        num_heads,
        f"chosen rows of {kv_lora_rank} + {rope} in {_name(dtype)}",
    )


def _taken_heads(refusal: Callable[[int], str | None], num_heads: int, over: str) -> int:
    said = f"the documents name {', '.join(map(str, _MLA_HEADS))} heads"
    for count in _MLA_HEADS:
        if count >= num_heads:
            found = refusal(count)
            if found is None:
                return count
            said = found
    raise _unsupported(f"{num_heads} heads over {over}", f"padded to {_MLA_HEADS[-1]}", said)


def _taken_size(refusal: Callable[[int], str | None], head_size: int, what: str) -> int:
    said = refusal(head_size)
    if said is None:
        return head_size
    larger = [size for size in _PADDED_SIZES if size > head_size]
    for size in larger:
        if refusal(size) is None:
            return size
    tried = f"padded to {', '.join(map(str, larger))}" if larger else None
    raise _unsupported(what, tried, said)


def _unsupported(what: str, tried: str | None, said: str) -> UnsupportedFeatureError:
    also = f", nor {tried}" if tried else ""
    return UnsupportedFeatureError(
        f"The attention operator of this device and CANN does not take {what}{also}. Start with "
        "--dtype bfloat16 if another dtype was asked for, another --tensor-parallel-size if the "
        f"number of heads is named, else with another model. It says: {said}"
    )


def _too_many(num_requests: int, said: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"The attention operator of this device and CANN does not take {num_requests} requests in "
        f"one step. Start with a smaller --max-num-seqs. It says: {said}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mask(sparse_mode: int) -> torch.Tensor | None:
    return compressed_causal_mask(torch.device("npu")) if sparse_mode else None


def _one_token_each(num_requests: int) -> dict[str, Any]:
    """Lengths and blocks of requests with one token each, in block 0."""
    return {
        "block_table": torch.zeros(num_requests, 1, dtype=torch.int32, device="npu"),
        "actual_seq_lengths": list(range(1, num_requests + 1)),
        "actual_seq_lengths_kv": [1] * num_requests,
    }


def _attend_to_one_block(
    num_heads: int,
    num_kv_heads: int,
    size: int,
    dtype: torch.dtype,
    sparse_mode: int,
    num_requests: int = 1,
    has_sinks: bool = False,
) -> None:
    new = functools.partial(torch.zeros, dtype=dtype, device="npu")
    block = new(1, BLOCK_SIZE_TOKENS, num_kv_heads * size)
    query = new(num_requests, num_heads, size)
    fused_attention.attend(
        query,
        block,
        block,
        out=[torch.empty_like(query), torch.empty(0, device="npu")],
        learnable_sink=new(num_heads) if has_sinks else None,
        atten_mask=_mask(sparse_mode),
        **_one_token_each(num_requests),
        num_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        input_layout="TND",
        block_size=BLOCK_SIZE_TOKENS,
        sparse_mode=sparse_mode,
    )


def _attend_to_itself(
    num_heads: int,
    num_kv_heads: int,
    size: int,
    value_size: int,
    dtype: torch.dtype,
    sparse_mode: int,
    rope: int = 0,
    num_requests: int = 1,
) -> None:
    new = functools.partial(torch.zeros, num_requests, dtype=dtype, device="npu")
    ends = list(range(1, num_requests + 1))
    torch_npu.npu_fused_infer_attention_score(
        new(num_heads, size),
        new(num_kv_heads, size),
        new(num_kv_heads, value_size),
        query_rope=new(num_heads, rope) if rope else None,
        key_rope=new(num_kv_heads, rope) if rope else None,
        atten_mask=_mask(sparse_mode),
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=ends,
        num_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        input_layout="TND",
        sparse_mode=sparse_mode,
    )
