"""A step's rows in bidirectional spans, and the keys that these rows see."""

import pytest
import torch

from vllm_davinci.core.attention.spans import BidirectionalSpans, whole_prompts
from vllm_davinci.core.errors import UnsupportedFeatureError


def of_step(
    ranges: dict[int, list[tuple[int, int]]], ends: list[int], seq_lens: list[int]
) -> BidirectionalSpans | None:
    table = torch.arange(len(ends), dtype=torch.int32).unsqueeze(1).npu()
    return BidirectionalSpans.of_step(ranges, ends, seq_lens, table)


def test_rows_and_lengths_of_spans_of_several_requests(device: torch.device):
    # The first request is whole, the second continues after 10 tokens, the third only decodes.
    spans = of_step(
        {0: [(1, 3), (5, 6)], 1: [(2, 9), (12, 15)], 2: [(0, 4)]}, [8, 16, 17], [8, 18, 40]
    )
    assert spans is not None
    assert spans.rows.tolist() == [1, 2, 3, 5, 6, 10, 11, 12, 13]
    assert spans.actual_seq_lengths_q == [3, 5, 9]
    assert spans.seq_lens == [4, 7, 16]
    assert spans.block_table.tolist() == [[0], [0], [1]]
    other = torch.tensor([[7], [8], [9]], dtype=torch.int32, device=device)
    assert spans.over(other).block_table.tolist() == [[7], [7], [8]]


def test_a_span_continues_after_its_computed_beginning(device: torch.device):
    spans = of_step({0: [(2, 9)]}, [6], [12])  # tokens 6 to 11 are new
    assert spans is not None
    assert spans.rows.tolist() == [0, 1, 2, 3]
    assert spans.seq_lens == [10]


@pytest.mark.parametrize("ranges", [{}, {0: []}, {0: [(2, 2)]}, {0: [(20, 29)]}])
def test_steps_without_tokens_of_spans_have_none(ranges, device):
    assert of_step(ranges, [6], [12]) is None


def test_whole_prompts_are_one_span_each():
    assert whole_prompts([0, 2], [20, 30, 8, 99]) == {0: [(0, 19)], 2: [(0, 7)]}


def test_a_span_that_is_cut_is_refused_with_the_option(device: torch.device):
    with pytest.raises(
        UnsupportedFeatureError, match=r"--max-num-batched-tokens is too small: .* tokens 8 to 15"
    ):
        of_step({0: [(8, 15)]}, [12], [12])
