"""The device's inference attention equals plain attention."""

from collections.abc import Sequence

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.operators.attention import visible_keys
from vllm_davinci_testing.operators.attention_definition import CAUSAL_MASK, attention, close
from vllm_davinci_testing.operators.strategies import FLOATS, shuffled, values

HEADS = [(4, 2, 64), (8, 1, 80), (3, 3, 40), (16, 2, 128)]  # query heads, key heads, head size


class Paged:
    """Sequences of keys and values in a cache with blocks in random order."""

    def __init__(
        self, lengths: Sequence[int], heads: int, size: int, block: int, dtype: torch.dtype
    ) -> None:
        self.lengths, self.heads, self.size, self.block = lengths, heads, size, block
        width = max(1, max(-(-n // block) for n in lengths))
        count = len(lengths) * width + 2
        self.table = shuffled(count)[: len(lengths) * width].view(len(lengths), width).int()
        self.cache = [values((count, block, heads, size), dtype, seed) for seed in (5, 6)]

    def sequence(self, which: int, request: int) -> torch.Tensor:
        """Returns a request's keys (0) or values (1): [heads, tokens, size]."""
        blocks = self.cache[which][self.table[request].long()]
        rows = blocks.reshape(-1, self.heads, self.size)[: self.lengths[request]]
        return rows.transpose(0, 1)

    def on_device(self, which: int, form: str) -> torch.Tensor:
        """Returns the cache in one of the three layouts that the device supports."""
        cache = self.cache[which]
        blocks, block, heads, size = cache.shape
        if form == "tokens first":
            cache = cache.reshape(blocks, block, heads * size)
        elif form == "heads first":
            cache = cache.transpose(1, 2).contiguous()
        else:
            cache = (
                cache.view(blocks, block, heads, size // 8, 8).permute(0, 2, 3, 1, 4).contiguous()
            )
        return cache.npu()


def mask_for(sparse_mode: int) -> torch.Tensor | None:
    return CAUSAL_MASK.npu() if sparse_mode in (2, 3, 4) else None


@pytest.mark.parametrize("form", ["tokens first", "heads first", "pieces"])
@given(
    dtype=st.sampled_from(FLOATS),
    heads=st.sampled_from(HEADS),
    block=st.sampled_from([16, 48, 128]),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=5),
    sparse_mode=st.sampled_from([0, 3, 4]),
    window=st.integers(0, 90),
)
def test_packed_queries_over_a_paged_cache(form, dtype, heads, block, lengths, sparse_mode, window):
    query_heads, key_heads, size = heads
    queries = [q for q, _ in lengths]
    keys = [q + more for q, more in lengths]
    cache = Paged(keys, key_heads, size, block, dtype)
    query = values((sum(queries), query_heads, size), dtype, 4)
    out, lse = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        cache.on_device(0, form),
        cache.on_device(1, form),
        atten_mask=mask_for(sparse_mode),
        actual_seq_lengths=torch.tensor(queries).cumsum(0).tolist(),
        actual_seq_lengths_kv=keys,
        block_table=cache.table.npu(),
        num_heads=query_heads,
        num_key_value_heads=key_heads,
        scale=size**-0.5,
        input_layout="TND",
        sparse_mode=sparse_mode,
        pre_tokens=window,
        next_tokens=0,
        block_size=block,
        softmax_lse_flag=True,
    )
    start = 0
    for r, (q, k) in enumerate(zip(queries, keys, strict=True)):
        # Without a mask, mode 0 ignores the window.
        visible = visible_keys(q, k, sparse_mode, window, 0) if sparse_mode else None
        expected, expected_lse = attention(
            query[start : start + q].transpose(0, 1),
            cache.sequence(0, r),
            cache.sequence(1, r),
            size**-0.5,
            visible,
        )
        close(out[start : start + q].transpose(0, 1), expected, dtype)
        close(lse[start : start + q, :, 0].t(), expected_lse, torch.float32)
        start += q


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@given(
    dtype=st.sampled_from(FLOATS),
    sparse_mode=st.sampled_from([0, 2, 3, 4]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 150)),
    partly=st.booleans(),
)
def test_dense_layouts(layout, dtype, sparse_mode, sizes, partly):
    batch, queries, keys = sizes
    query = values((batch, 4, queries, 32), dtype, 1)
    key = values((batch, 2, keys, 32), dtype, 2)
    value = values((batch, 2, keys, 32), dtype, 3)
    lengths = [max(1, keys - 3 * i) for i in range(batch)] if partly else [keys] * batch
    first = layout.split("_")[0]

    def laid_out(t: torch.Tensor) -> torch.Tensor:
        if first == "BNSD":
            return t.npu()
        t = t.transpose(1, 2).contiguous()
        return (t.flatten(2) if first == "BSH" else t).npu()

    out, _ = torch_npu.npu_fused_infer_attention_score(
        laid_out(query),
        laid_out(key),
        laid_out(value),
        atten_mask=mask_for(sparse_mode),
        actual_seq_lengths_kv=lengths if partly else None,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.25,
        input_layout=layout,
        sparse_mode=sparse_mode,
        pre_tokens=20,
        next_tokens=3,
    )
    if layout.endswith("BSND"):
        out = out.transpose(1, 2)
    elif layout == "BSH":
        out = out.view(batch, queries, 4, 32).transpose(1, 2)
    for b in range(batch):
        # With single queries, the device ignores the patterns of modes 0 to 3.
        bounded = sparse_mode == 4 or (queries > 1 and sparse_mode)
        visible = visible_keys(queries, lengths[b], sparse_mode, 20, 3) if bounded else None
        expected, _ = attention(
            query[b], key[b, :, : lengths[b]], value[b, :, : lengths[b]], 0.25, visible
        )
        close(out[b], expected, dtype)


@given(
    dtype=st.sampled_from(FLOATS),
    form=st.sampled_from([(6, 33), (1, 6, 33), (2, 1, 6, 33)]),
    mode=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_masks_hide_marked_keys(dtype, form, mode, seed):
    query, key = values((2, 4, 6, 32), dtype, 1), values((2, 4, 33, 32), dtype, 2)
    mask = values(form, torch.bool, seed)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(), key.npu(), key.npu(), atten_mask=mask.npu(), num_heads=4, scale=0.3,
        input_layout="BNSD", sparse_mode=mode, pre_tokens=100, next_tokens=10,
    )  # fmt: skip
    for b in range(2):
        hidden = mask.reshape(-1, 6, 33)[b % mask.reshape(-1, 6, 33).shape[0]]
        visible = ~hidden & visible_keys(6, 33, mode, 100, 10)
        close(out[b], attention(query[b], key[b], key[b], 0.3, visible)[0], dtype)


def test_a_bias_is_added_to_the_scaled_scores() -> None:
    query, key = values((2, 4, 9, 32), torch.float32, 1), values((2, 4, 70, 32), torch.float32, 2)
    bias = values((1, 4, 9, 70), torch.float32, 3)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(), key.npu(), key.npu(), pse_shift=bias.npu(), num_heads=4, scale=0.3,
        input_layout="BNSD",
    )  # fmt: skip
    for b in range(2):
        expected = attention(query[b], key[b], key[b], 0.3, None, bias[0])[0]
        close(out[b], expected, torch.float32)


@pytest.mark.parametrize("heads", [4, 32])
@given(dtype=st.sampled_from(FLOATS), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3))
def test_latent_attention_adds_the_rotary_part(heads, dtype, lengths):
    batch = len(lengths)
    latent = Paged(lengths, 1, 128, 128, dtype)
    rotary = Paged(lengths, 1, 64, 128, dtype)
    rotary.table = latent.table
    query, query_rope = (values((batch, heads, n), dtype, n) for n in (128, 64))
    out, lse = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        latent.on_device(0, "tokens first"),
        latent.on_device(0, "tokens first"),
        query_rope=query_rope.npu(),
        key_rope=rotary.on_device(0, "tokens first"),
        actual_seq_lengths=list(range(1, batch + 1)),
        actual_seq_lengths_kv=lengths,
        block_table=latent.table.npu(),
        num_heads=heads,
        num_key_value_heads=1,
        scale=0.1,
        input_layout="TND",
        block_size=128,
        softmax_lse_flag=True,
    )
    for r in range(batch):
        key = torch.cat([latent.sequence(0, r), rotary.sequence(0, r)], -1)
        whole = torch.cat([query[r], query_rope[r]], -1)[:, None]
        expected, expected_lse = attention(whole, key, latent.sequence(0, r), 0.1)
        close(out[r][:, None], expected, dtype)
        close(lse[r], expected_lse, torch.float32)


def test_a_sink_takes_part_in_the_softmax_without_a_value() -> None:
    query, key = values((3, 8, 64), torch.float32, 1), values((20, 8, 64), torch.float32, 2)
    sink = values((8,), torch.float32, 3)
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(), key.npu(), key.npu(), learnable_sink=sink.npu(), actual_seq_qlen=[1, 3],
        actual_seq_kvlen=[7, 20], num_query_heads=8, softmax_scale=0.2, input_layout="TND",
    )  # fmt: skip
    for q, k in ((slice(0, 1), slice(0, 7)), (slice(1, 3), slice(7, 20))):
        rows = key[k].transpose(0, 1)
        expected = attention(query[q].transpose(0, 1), rows, rows, 0.2, None, None, sink)[0]
        close(out[q].transpose(0, 1), expected, torch.float32)
