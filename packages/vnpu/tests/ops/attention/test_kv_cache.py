"""The KV cache contains exactly what was written to it."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.operators.quantization import to_int8
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import shuffled, values

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


@given(
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
    tokens=st.integers(0, 60),
    half_of_a_pair=st.booleans(),
)
def test_tokens_go_to_their_slots(dtype, index, tokens, half_of_a_pair):
    key, value = values((tokens, 2, 24), dtype, 1), values((tokens, 2, 40), dtype, 2)
    slots = shuffled(4 * 16)[:tokens].to(index)
    if tokens > 2:
        slots[1] = -1  # padding has no slot
    caches = [torch.zeros(4, 16, 2, size, dtype=dtype) for size in (24, 40)]
    npu = [c.npu() for c in caches]
    if half_of_a_pair:  # a cache with keys and values in one tensor is written through slices
        npu = [torch.stack([c, c])[1] for c in npu]
    torch_npu.npu_scatter_pa_kv_cache(
        key.npu(), value.npu(), npu[0], npu[1], slots.npu(), cache_mode="Norm"
    )
    for cache, rows in zip(caches, (key, value), strict=True):
        used = slots >= 0
        cache.view(64, 2, -1)[slots[used].long()] = rows[used]
    compare(npu[0], caches[0])
    compare(npu[1], caches[1])


@given(dtype=st.sampled_from([torch.float16, torch.int8]), tokens=st.integers(1, 40))
def test_pieces_of_a_row_lie_apart(dtype: torch.dtype, tokens: int) -> None:
    piece = 32 // dtype.itemsize
    key = values((tokens, 2, 2 * piece), dtype, 1)
    slots = shuffled(48)[:tokens].int()
    cache = torch.zeros(3, 4, 16, piece, dtype=dtype)
    npu = [cache.npu(), cache.npu()]
    torch_npu.npu_scatter_pa_kv_cache(
        key.npu(), key.npu(), npu[0], npu[1], slots.npu(), cache_mode="PA_NZ"
    )
    for t, slot in enumerate(slots.tolist()):
        cache[slot // 16, :, slot % 16] = key[t].reshape(4, piece)
    compare(npu[0], cache)
    compare(npu[1], cache)


def test_only_keys_can_be_written() -> None:
    cache, key = torch.zeros(2, 16, 1, 8).npu(), values((3, 1, 8), torch.float32, 1)
    torch_npu.npu_scatter_pa_cache(
        key.npu(), torch.tensor([4, 31, 0], dtype=torch.int32).npu(), key_cache=cache
    )
    compare(cache.view(32, 8)[torch.tensor([4, 31, 0]).npu()], key.view(3, 8))


def test_a_slot_outside_of_the_cache_is_refused() -> None:
    cache, key = torch.zeros(2, 16, 1, 8).npu(), torch.zeros(1, 1, 8).npu()
    with pytest.raises(RuntimeError, match=r"slotMapping\[0\] is 32, but the cache has 32 slots"):
        torch_npu.npu_scatter_pa_kv_cache(
            key, key, cache, cache.clone(), torch.tensor([32]).npu(), cache_mode="Norm"
        )
        torch.npu.synchronize()


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    cumulative=st.booleans(),
    offset=st.booleans(),
)
def test_blocks_are_gathered_in_the_order_of_the_table(lengths, cumulative, offset):
    caches = [values((20, 16, 2, size), torch.float16, size) for size in (24, 8)]
    table = shuffled(20).view(4, 5).int()[: len(lengths)]
    out = [torch.zeros(sum(lengths), 2, size, dtype=torch.float16).npu() for size in (24, 8)]
    sizes = torch.tensor(lengths).int()
    if cumulative:
        sizes = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    first = [i % 2 for i in range(len(lengths))] if offset else [0] * len(lengths)
    torch_npu.npu_gather_pa_kv_cache(
        caches[0].npu(), caches[1].npu(), table.npu(), sizes.npu(), out[0], out[1],
        seq_offset=torch.tensor([16 * f for f in first]).int().npu() if offset else None,
        is_seq_lens_cumsum=cumulative,
    )  # fmt: skip
    for cache, got in zip(caches, out, strict=True):
        rows = [cache[table[r, first[r] :].long()].flatten(0, 1)[:n] for r, n in enumerate(lengths)]
        compare(got, torch.cat(rows))


@given(depth=st.integers(1, 3), index=st.sampled_from([torch.int32, torch.int64]))
def test_scatter_nd_update(depth: int, index: torch.dtype) -> None:
    x = values((4, 5, 6), torch.float32, 1)
    chosen = shuffled(4)[:3]
    indices = torch.stack(
        [chosen, *(values((3,), torch.int64, n, low=0, high=5) for n in range(depth - 1))], -1
    )
    updates = values((3, *x.shape[depth:]), torch.float32, 2)
    npu = x.npu()
    torch_npu.npu_scatter_nd_update_(npu, indices.to(index).npu(), updates.npu())
    x[tuple(indices.unbind(-1))] = updates
    compare(npu, x)


@pytest.mark.parametrize("masked", [False, True])
def test_scatter_list_writes_one_update_per_tensor(masked: bool) -> None:
    tensors = [values((2, 9, 8), torch.float32, n) for n in range(3)]
    updates, starts = values((3, 2, 2, 8), torch.float32, 9), [0, 7, 3]
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8).npu() if masked else None
    out = torch_npu.npu_scatter_list(
        [t.npu() for t in tensors], torch.tensor(starts).npu(), updates.npu(), mask, "update", -2
    )
    for i, (t, start) in enumerate(zip(tensors, starts, strict=True)):
        if not masked or i != 1:
            t[:, start : start + 2] = updates[i]
        compare(out[i], t)


def test_updates_are_quantized_on_the_way() -> None:
    cache, updates = torch.zeros(2, 4, 32, dtype=torch.int8), values((2, 1, 32), torch.float16, 1)
    scales = values((32,), torch.float32, 2, low=0.02, high=0.1)
    out = torch_npu.npu_quant_scatter(
        cache.npu(), torch.tensor([1, 3], dtype=torch.int32).npu(), updates.npu(), scales.npu()
    )
    quantized = to_int8(updates.float() / scales)
    cache[0, 1], cache[1, 3] = quantized[0, 0], quantized[1, 0]
    compare(out, cache)
