"""Lengths in steps that are padded to a graph's size."""

import pytest

from vllm_davinci.core.attention.metadata import padded_lengths


@pytest.mark.parametrize(
    ("ends", "seq_lens", "num_tokens", "expected"),
    [
        ([1, 2, 3], [9, 5, 7], 3, ([1, 2, 3], [9, 5, 7])),
        ([1, 2, 2, 2], [9, 5, 0, 0], 4, ([1, 2, 3, 4], [9, 5, 1, 1])),
        ([3, 6, 6], [30, 40, 99], 9, ([3, 6, 9], [30, 40, 3])),
        ([0, 0], [4, 4], 2, ([1, 2], [1, 1])),
    ],
)
def test_padding_requests_have_one_token_per_query(ends, seq_lens, num_tokens, expected):
    assert padded_lengths(ends, seq_lens, num_tokens) == expected
