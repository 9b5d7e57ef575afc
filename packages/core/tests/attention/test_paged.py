"""Attention on the device against a softmax written out in plain torch."""

import pytest
import torch
from vllm.v1.attention.backend import AttentionType

from vllm_davinci.core.attention.metadata import NPUAttentionMetadata
from vllm_davinci.core.attention.paged import NPUAttentionImpl, PagedCache
from vllm_davinci.core.errors import UnsupportedFeatureError

BLOCK_SIZE = 128


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    is_visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [q, heads, d], keys and values [k, kv_heads, d], is_visible [q, k] -> [q, heads, d]

    sinks: [heads], a score that takes part in each softmax, without a value
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * scale
    scores.masked_fill_(~is_visible, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.double()).to(query.dtype)


def visible(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Which keys a query sees when the last query is the last key."""
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


class Batch:
    """Requests with some tokens in the cache already and some new ones, in shuffled blocks."""

    def __init__(self, lengths, num_heads, num_kv_heads, head_size, dtype, device):
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        blocks_each = [-(-(context + new) // BLOCK_SIZE) for context, new in lengths]
        num_blocks = sum(blocks_each) + 1
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        table = torch.zeros(len(lengths), max(blocks_each), dtype=torch.int32)
        shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_size)
        key_cache, value_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.query, self.key, self.value, slots = [], [], [], []
        for row, ((context, new), count) in enumerate(zip(lengths, blocks_each, strict=True)):
            own = [ids.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(own)
            slot = torch.tensor([own[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                                 for p in range(context + new)])  # fmt: skip
            random = [
                torch.randn(context + new, heads, head_size, generator=generator).to(dtype)
                for heads in (num_heads, num_kv_heads, num_kv_heads)
            ]
            self.query.append(random[0][context:])
            self.key.append(random[1])
            self.value.append(random[2])
            key_cache.flatten(0, 1)[slot[:context]] = random[1][:context]
            value_cache.flatten(0, 1)[slot[:context]] = random[2][:context]
            slots.append(slot[context:])
        self.cache = PagedCache.of(key_cache.to(device), value_cache.to(device))
        query_lens = torch.tensor([new for _, new in lengths])
        self.metadata = NPUAttentionMetadata(
            num_actual_tokens=int(query_lens.sum()),
            actual_seq_lengths_q=query_lens.cumsum(0).tolist(),
            seq_lens=[context + new for context, new in lengths],
            block_table=table.to(device),
            slot_mapping=torch.cat(slots).to(device),
        )
        self.device = device

    def new_rows(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [row[context:] for row, (context, _) in zip(rows, self.lengths, strict=True)]
        )

    def run(self, attention: NPUAttentionImpl, num_padding_rows: int = 0) -> torch.Tensor:
        new = [torch.cat(self.query), self.new_rows(self.key), self.new_rows(self.value)]
        new = [
            torch.cat([rows, rows.new_full((num_padding_rows, *rows.shape[1:]), 9.0)]).to(
                self.device
            )
            for rows in new
        ]
        query, key, value = new
        # Rows as they are in a projection that is divided into parts.
        together = torch.cat((key, value), 1)
        key, value = together.split((key.shape[1], value.shape[1]), 1)
        output = torch.full_like(query, 7.0)
        returned = attention.forward(None, query, key, value, self.cache, self.metadata, output)
        assert returned is output
        return output.cpu()

    def expected(
        self, scale: float, window: int | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.cat(
            [
                reference(q, k, v, scale, visible(len(q), len(k), window), sinks)
                for q, k, v in zip(self.query, self.key, self.value, strict=True)
            ]
        )


DECODES = [(5, 1), (127, 1), (128, 1), (300, 1)]
PREFILLS = [(0, 3), (0, 200), (0, 1)]
MIXED = [(40, 1), (0, 150), (130, 20), (255, 1)]


@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_attention_over_the_cache_equals_a_written_out_softmax(
    lengths, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device
):
    batch = Batch(lengths, num_heads, num_kv_heads, head_size, torch.float32, device)
    attention = NPUAttentionImpl(num_heads, head_size, 0.125, num_kv_heads)
    torch.testing.assert_close(batch.run(attention), batch.expected(0.125), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_attention_in_16_bits_is_close_to_a_written_out_softmax(
    dtype: torch.dtype, tolerance: float, device: torch.device
):
    batch = Batch(MIXED, 4, 2, 64, dtype, device)
    torch.testing.assert_close(
        batch.run(NPUAttentionImpl(4, 64, 0.125, 2)),
        batch.expected(0.125),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize("window", [1, 16, 129, 4096])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
def test_a_sliding_window_hides_older_keys(lengths, window: int, device: torch.device):
    batch = Batch(lengths, 4, 2, 64, torch.float32, device)
    attention = NPUAttentionImpl(4, 64, 0.125, 2, sliding_window=window)
    torch.testing.assert_close(
        batch.run(attention), batch.expected(0.125, window), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
def test_sinks_take_part_in_the_softmax_without_a_value(
    lengths, window: int | None, device: torch.device
):
    batch = Batch(lengths, 8, 2, 64, torch.float32, device)
    sinks = torch.nn.Parameter(torch.zeros(8, device=device))
    attention = NPUAttentionImpl(8, 64, 0.125, 2, sliding_window=window, sinks=sinks)
    loaded = torch.linspace(-2.0, 3.0, 8)
    sinks.data.copy_(loaded)  # as a checkpoint is, after the layer was made
    with torch.inference_mode():
        result = batch.run(attention)
    torch.testing.assert_close(result, batch.expected(0.125, window, loaded), atol=1e-5, rtol=1e-5)


def test_padding_rows_become_zero_and_change_nothing_else(device: torch.device):
    plain = Batch(MIXED, 4, 2, 64, torch.float32, device)
    padded = Batch(MIXED, 4, 2, 64, torch.float32, device)
    attention = NPUAttentionImpl(4, 64, 0.125, 2)
    expected, actual = plain.run(attention), padded.run(attention, num_padding_rows=5)
    assert torch.equal(actual[:-5], expected)
    assert torch.equal(actual[-5:], torch.zeros_like(actual[-5:]))
    assert torch.equal(plain.cache.key.cpu(), padded.cache.key.cpu())


def test_slots_of_minus_one_are_not_written(device: torch.device):
    batch = Batch([(0, 4)], 4, 2, 64, torch.float32, device)
    before = batch.cache.key.cpu()
    batch.metadata.slot_mapping.fill_(-1)
    batch.run(NPUAttentionImpl(4, 64, 0.125, 2))
    assert torch.equal(batch.cache.key.cpu(), before)


def test_a_layer_that_shares_another_cache_does_not_write_it(device: torch.device):
    batch = Batch([(0, 4)], 4, 2, 64, torch.float32, device)
    before = batch.cache.key.cpu()
    batch.run(NPUAttentionImpl(4, 64, 0.125, 2, kv_sharing_target_layer_name="layers.0.attn"))
    assert torch.equal(batch.cache.key.cpu(), before)


@pytest.mark.parametrize("window", [None, 8])
def test_an_encoder_sees_both_directions_and_other_requests_never(
    window: int | None, device: torch.device
):
    batch = Batch([(0, 30), (0, 1), (0, 140)], 4, 4, 64, torch.float32, device)
    attention = NPUAttentionImpl(
        4, 64, 0.125, 4, sliding_window=window, attn_type=AttentionType.ENCODER_ONLY
    )
    expected = []
    for q, k, v in zip(batch.query, batch.key, batch.value, strict=True):
        distance = (torch.arange(len(q))[:, None] - torch.arange(len(k))).abs()
        seen = distance < (window or len(k) + 1)
        expected.append(reference(q, k, v, 0.125, seen))
    torch.testing.assert_close(batch.run(attention), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_profile_run_without_metadata_gives_zeros(device: torch.device):
    query = torch.randn(3, 4, 64, device=device)
    output = torch.full_like(query, 7.0)
    NPUAttentionImpl(4, 64, 0.125, 4).forward(None, query, query, query, None, None, output)
    assert torch.equal(output.cpu(), torch.zeros(3, 4, 64))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"logits_soft_cap": 50.0}, r"soft-capped attention logits \(cap 50.0\)"),
        ({"attn_type": AttentionType.ENCODER}, "encoder"),
        ({"chunk_lookback": 1}, "'chunk_lookback'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(options, named: str):
    with pytest.raises(UnsupportedFeatureError, match=named):
        NPUAttentionImpl(4, 64, 0.125, 4, **options)
