"""Attention on the device, compared with a softmax in plain torch."""

import pytest
import torch
from vllm.v1.attention.backend import AttentionType

from vllm_davinci.core.attention.paged import NPUAttentionImpl
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci_testing.layers.paged_batch import DECODES, MIXED, PREFILLS, Batch, reference


@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_attention_over_the_cache_equals_a_plain_softmax(
    lengths, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device
):
    batch = Batch(lengths, num_heads, num_kv_heads, head_size, torch.float32, device)
    attention = NPUAttentionImpl(num_heads, head_size, 0.125, num_kv_heads)
    torch.testing.assert_close(batch.run(attention), batch.expected(0.125), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_attention_in_16_bits_is_close_to_a_plain_softmax(dtype, tolerance, device):
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
def test_sinks_take_part_in_the_softmax_without_a_value(lengths, window, device):
    batch = Batch(lengths, 8, 2, 64, torch.float32, device)
    sinks = torch.nn.Parameter(torch.zeros(8, device=device))
    attention = NPUAttentionImpl(8, 64, 0.125, 2, sliding_window=window, sinks=sinks)
    loaded = torch.linspace(-2.0, 3.0, 8)
    sinks.data.copy_(loaded)  # loaded after the layer was created, as from a checkpoint
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
def test_an_encoder_sees_both_directions_and_no_other_request(window, device):
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
        (
            {"alibi_slopes": [0.5] * 4, "attn_type": AttentionType.ENCODER_ONLY},
            "ALiBi position biases in attention of type",
        ),
        (
            {"logits_soft_cap": 50.0, "sinks": torch.zeros(4)},
            r"soft-capped attention logits \(cap 50.0\) beside sinks",
        ),
        ({"attn_type": AttentionType.ENCODER}, "encoder"),
        ({"chunk_lookback": 1}, "'chunk_lookback'"),
    ],
)
def test_unsupported_attention_is_refused_by_name(options, named: str):
    with pytest.raises(UnsupportedFeatureError, match=named):
        NPUAttentionImpl(4, 64, 0.125, 4, **options)
