"""The KV cache contains exactly what was written to it."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import shuffled, values

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


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
