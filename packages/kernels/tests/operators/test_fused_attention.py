"""Attention over caches and over the batch equals torch_npu's launches and its definition."""

import pytest
import torch
import torch_npu

from vllm_davinci import operators

ops = torch.ops.vllm_davinci
BLOCK, SIZE = 16, 64
ALL = 2147483647
CAUSAL_MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
# sparse_mode, pre_tokens, next_tokens
MODES = {"all": (0, ALL, ALL), "causal": (3, ALL, ALL), "window": (4, 5, 0)}


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    limit = 32 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(npu.cpu(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1, 1], [20, 3]), ([5, 1, 9], [21, 33, 9])])
def test_step_goes_into_the_cache_and_sees_it(mode, dtype, heads, query_lens, seq_lens):
    generator = torch.Generator().manual_seed(len(query_lens))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    num_tokens, width = sum(query_lens), 3
    query = normal(num_tokens, heads[0], SIZE)
    key, value = (normal(num_tokens, heads[1], SIZE) for _ in range(2))
    caches = [normal(12, BLOCK, heads[1], SIZE) for _ in range(2)]
    table = torch.randperm(12, generator=generator)[: len(query_lens) * width]
    table = table.view(-1, width).int()
    positions = [
        (request, length - queries + n)
        for request, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for n in range(queries)
    ]
    slots = torch.tensor([int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in positions])
    ends = torch.tensor(query_lens).cumsum(0).tolist()
    sparse_mode, pre_tokens, next_tokens = MODES[mode]
    mask = None if mode == "all" else CAUSAL_MASK
    on_device = [t.npu() for t in (query, key, value, *caches, slots, table)]
    device_mask = None if mask is None else mask.npu()
    rest = (ends, seq_lens, device_mask, 0.125, sparse_mode, pre_tokens, next_tokens)
    out = torch.empty_like(on_device[0])
    # Keys and values are slices of a fused projection's output.
    parts = torch.cat((key, value), 1).npu().split((heads[1], heads[1]), 1)
    ops.paged_attention(on_device[0], *parts, *on_device[3:], *rest, out)

    others = [t.npu() for t in caches]
    torch_npu.npu_scatter_pa_kv_cache(
        on_device[1], on_device[2], *others, on_device[5], cache_mode="Norm"
    )
    expected, _ = torch_npu.npu_fused_infer_attention_score(
        on_device[0], others[0].flatten(2), others[1].flatten(2), atten_mask=device_mask,
        block_table=on_device[6], actual_seq_lengths=ends, actual_seq_lengths_kv=seq_lens,
        num_heads=heads[0], num_key_value_heads=heads[1], scale=0.125, input_layout="TND",
        block_size=BLOCK, sparse_mode=sparse_mode, pre_tokens=pre_tokens, next_tokens=next_tokens,
    )  # fmt: skip
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(on_device[3:5], others, strict=True))
    defined = torch.empty_like(query)
    operators.paged_attention(query, key, value, *caches, slots, table, *rest, defined)
    near(out, defined)
    # Tokens that are already cached need not be passed again.
    again = torch.empty_like(out)
    ops.paged_attention(on_device[0], None, None, *on_device[3:5], None, on_device[6], *rest, again)
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("mode", ["all", "causal"])
def test_batch_attends_to_itself(dtype: torch.dtype, with_rope: bool, mode: str) -> None:
    generator = torch.Generator().manual_seed(3)
    ends = [4, 5, 12]
    query, key, value, query_rope, key_rope = (
        torch.randn(12, 4, n, generator=generator).to(dtype) for n in (32, 32, 32, 64, 64)
    )
    ropes = (query_rope, key_rope) if with_rope else (None, None)
    device_ropes = [None if rope is None else rope.npu() for rope in ropes]
    sparse_mode = MODES[mode][0]
    mask = None if mode == "all" else CAUSAL_MASK.npu()
    on_device = [t.npu() for t in (query, key, value)]
    out, lse = ops.prefill_attention(
        *on_device, *device_ropes, ends, ends, mask, 0.1, sparse_mode, ALL, ALL, True
    )
    expected, expected_lse = torch_npu.npu_fused_infer_attention_score(
        *on_device, query_rope=device_ropes[0], key_rope=device_ropes[1], atten_mask=mask,
        actual_seq_lengths=ends, actual_seq_lengths_kv=ends, num_heads=4, num_key_value_heads=4,
        scale=0.1, input_layout="TND", sparse_mode=sparse_mode, softmax_lse_flag=True,
    )  # fmt: skip
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    defined, defined_lse = operators.prefill_attention(
        query, key, value, *ropes, ends, ends, mask, 0.1, sparse_mode, ALL, ALL, True
    )
    near(out, defined)
    torch.testing.assert_close(lse.cpu(), defined_lse, rtol=1e-3, atol=1e-3)
    alone, none = ops.prefill_attention(
        *on_device, *device_ropes, ends, ends, mask, 0.1, sparse_mode, ALL, ALL, False
    )
    assert none is None and torch.equal(alone, out)


def test_one_of_key_and_value_is_not_enough() -> None:
    query = torch.ones(2, 4, SIZE).npu()
    caches = [torch.zeros(2, BLOCK, 4, SIZE).npu() for _ in range(2)]
    table, slots = torch.zeros(2, 1, dtype=torch.int32).npu(), torch.zeros(2).long().npu()
    rest = (table, [1, 2], [1, 1], None, 1.0, 0, ALL, ALL, torch.empty_like(query))
    with pytest.raises(ValueError, match="give both, or neither"):
        ops.paged_attention(query, query, None, *caches, slots, *rest)
    with pytest.raises(ValueError, match="keys without slot_mapping"):
        ops.paged_attention(query, query, query, *caches, None, *rest)
