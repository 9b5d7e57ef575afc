"""Attention composed of torch's operators equals a softmax in plain torch."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_davinci.core.attention import composed_plan
from vllm_davinci.core.attention.composed_plan import ComposedPlan
from vllm_davinci.core.attention.metadata import NPUAttentionMetadataBuilder
from vllm_davinci.core.attention.paged import NPUAttentionImpl
from vllm_davinci.core.attention.spans import BidirectionalSpans
from vllm_davinci_testing.layers.paged_batch import DECODES, MIXED, PREFILLS, Batch, reference

NAN = float("nan")
SLOPES = [0.5, 0.25, 0.125, 0.0625]
RULES = [
    ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
    ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
]


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("options", "of_scores"), RULES, ids=["capped", "alibi"])
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
def test_scores_follow_the_rule(lengths, options, of_scores, window, device):
    batch = Batch(lengths, 4, 2, 80, torch.float32, device)
    attention = NPUAttentionImpl(4, 80, 0.5, 2, sliding_window=window, **options)
    expected = batch.expected(0.5, window, **of_scores)
    assert not torch.allclose(expected, batch.expected(0.5, window), atol=1e-2)
    torch.testing.assert_close(batch.run(attention), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("options", "of_scores"), RULES, ids=["capped", "alibi"])
def test_16_bits_are_computed_in_fp32(options, of_scores, device: torch.device):
    batch = Batch(MIXED, 4, 2, 64, torch.bfloat16, device)
    torch.testing.assert_close(
        batch.run(NPUAttentionImpl(4, 64, 0.5, 2, **options)),
        batch.expected(0.5, **of_scores),
        atol=1e-4,
        rtol=2**-7,  # the last bit of a bf16 result
    )


def test_chunks_of_any_size_give_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    lengths = [(5, 1), (127, 1), (300, 1), (0, 150), (130, 20)]
    batch = Batch(lengths, 4, 2, 64, torch.float32, device)
    attention = NPUAttentionImpl(4, 64, 0.5, 2, logits_soft_cap=2.0)
    expected = batch.run(attention)
    monkeypatch.setattr(composed_plan, "SCORES", 4 * 7 * 256)  # 7 rows of 4 heads over two blocks
    del batch.metadata.composed_plan
    pieces = list(batch.metadata.composed_plan.pieces(4, 128))
    assert len(pieces) > 20
    torch.testing.assert_close(batch.run(attention), expected, atol=1e-6, rtol=1e-6)
    monkeypatch.setattr(composed_plan, "KEYS", 2 * 256 * 128)  # two requests with two blocks each
    del batch.metadata.composed_plan
    pieces = list(batch.metadata.composed_plan.pieces(4, 128))
    assert [piece.num_requests for piece in pieces[:2]] == [2, 1]
    torch.testing.assert_close(batch.run(attention), expected, atol=1e-6, rtol=1e-6)


def test_unused_page_entries_do_not_matter(device: torch.device):
    batch = Batch(MIXED, 4, 2, 64, torch.float32, device)
    attention = NPUAttentionImpl(4, 64, 0.5, 2, logits_soft_cap=2.0)
    expected = batch.run(attention)
    for part in batch.cache.parts:
        host = part.cpu()
        for row, (context, new) in enumerate(batch.lengths):
            last = context + new - 1
            host[batch.metadata.block_table[row].cpu()[last // 128], last % 128 + 1 :] = NAN
        part.copy_(host)
    assert torch.equal(batch.run(attention), expected)


def test_tokens_of_a_span_see_each_other(device: torch.device):
    lengths = [(20, 1), (0, 30)]
    batch = Batch(lengths, 4, 2, 64, torch.float32, device)
    metadata = batch.metadata
    metadata.spans = BidirectionalSpans.of_step(
        {1: [(3, 9)]}, metadata.actual_seq_lengths_q, metadata.seq_lens, metadata.block_table
    )
    result = batch.run(NPUAttentionImpl(4, 64, 0.5, 2, logits_soft_cap=2.0))
    distance = torch.arange(30)[:, None] - torch.arange(30)
    is_visible = distance >= 0
    is_visible[3:10, 3:10] = True
    tensors = batch.query[1], batch.key[1], batch.value[1]
    expected = reference(*tensors, 0.5, is_visible, soft_cap=2.0)
    torch.testing.assert_close(result[1:], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "support"),
    [({}, AttentionCGSupport.UNIFORM_BATCH), ({"logits_soft_cap": 2.0}, AttentionCGSupport.NEVER)],
)
def test_it_runs_outside_of_graphs(options, support, device: torch.device):
    layer = SimpleNamespace(impl=NPUAttentionImpl(4, 64, 0.5, 2, **options))
    context = {"layers.0.attn": layer, "layers.0.conv": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    assert NPUAttentionMetadataBuilder.get_cudagraph_support(config, None) is support


def test_a_plan_groups_requests_of_equal_length(device: torch.device):
    plan = ComposedPlan([1, 2, 3, 5, 5, 12], [7, 130, 20, 9, 4, 7], device)
    pieces = list(plan.pieces(1, 1))
    assert [(piece.rows, piece.requests) for piece in pieces] == [
        (slice(0, 3), slice(0, 3)),
        (slice(3, 5), slice(3, 4)),
        (slice(5, 12), slice(5, 6)),
    ]
    assert [piece.num_blocks for piece in pieces] == [2, 1, 1]
    assert pieces[0].positions.tolist() == [[6], [129], [19]]
    assert pieces[1].positions.tolist() == [[7, 8]]
