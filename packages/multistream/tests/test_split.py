"""Places where steps are cut."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.multistream import CutMode, SplitError, choose_cuts, split_at

# Query lengths -> cut in tokens and in requests (None: no legal cut).
TABLE = [
    ([100, 100, 100, 100], 200, 2),
    ([8] * 41, 168, 21),
    ([300, 50], None, None),
    ([10, 150, 140], 160, 2),
    ([1] * 200 + [220], 200, 200),
    ([512], None, None),
    ([1, 1, 1, 1, 1], 2, 2),
]


@pytest.mark.parametrize(("query_lens", "tokens", "requests"), TABLE)
def test_the_cut_of_request_mode(query_lens, tokens, requests):
    cuts = choose_cuts(query_lens)
    if tokens is None:
        assert cuts == []
        return
    assert cuts == [tokens]
    assert split_at(query_lens, cuts).ubatches[0].num_requests == requests


def test_token_mode_cuts_inside_a_request_at_the_alignment() -> None:
    assert choose_cuts([512], mode="token") == [256]
    assert choose_cuts([510], mode="token", alignment=16) == [256]
    split = split_at([500, 12], [256])
    assert [part.requests for part in split.ubatches] == [slice(0, 1), slice(0, 2)]


def test_token_mode_leaves_decodes_of_several_tokens_whole() -> None:
    decodes = [4] * 5
    assert choose_cuts(decodes, mode="token") == [10]
    assert choose_cuts(decodes, mode="token", decode_query_len=4) == [12]
    assert choose_cuts([4, 4, 40], mode="token", decode_query_len=4) == [24]  # cuts a prompt
    assert choose_cuts([4], mode="token", decode_query_len=4) == []
    assert choose_cuts([5] * 3, mode="token", decode_query_len=5, alignment=4) == [10]


def test_more_than_two_parts() -> None:
    assert choose_cuts([100] * 6, num_ubatches=3) == [200, 400]
    assert choose_cuts([7] * 90, num_ubatches=4, mode="token") == [157, 315, 472]


def test_the_first_part_may_be_larger_than_the_others() -> None:
    assert choose_cuts([512], mode="token", first_share=0.53, alignment=16) == [272]
    assert choose_cuts([60] * 10, first_share=0.7) == [420]
    assert choose_cuts([90] * 10, num_ubatches=3, mode="token", first_share=0.5) == [450, 675]
    assert choose_cuts([3, 1], mode="token", first_share=0.01) == []


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_that_leaves_a_part_empty_is_refused(share: float) -> None:
    with pytest.raises(SplitError, match="between 0 and 1"):
        choose_cuts([4, 4], first_share=share)


@pytest.mark.parametrize("lengths", [[1], [], [1, 1]])
def test_fewer_tokens_than_parts_is_an_error(lengths: list[int]) -> None:
    with pytest.raises(SplitError, match="cannot fill"):
        choose_cuts(lengths, num_ubatches=3)


@pytest.mark.parametrize("cuts", [[0], [5], [3, 3], [4, 2], []])
def test_cuts_that_leave_a_part_empty_are_refused(cuts: list[int]) -> None:
    with pytest.raises(SplitError, match="non-empty"):
        split_at([2, 3], cuts)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=30),
    parts=st.integers(2, 4),
    mode=st.sampled_from(get_args(CutMode)),
)
def test_parts_hold_every_token_and_request_once_in_order(lengths, parts, mode):
    total = sum(lengths)
    if parts > total:
        return
    cuts = choose_cuts(lengths, num_ubatches=parts, mode=mode)
    if not cuts:
        return
    split = split_at(lengths, cuts)
    assert [part.tokens.start for part in split.ubatches] == [0, *cuts]
    assert split.ubatches[-1].tokens.stop == total
    assert split.ubatches[0].requests.start == 0
    assert split.ubatches[-1].requests.stop == len(lengths)
    owner = [request for request, length in enumerate(lengths) for _ in range(length)]
    for part in split.ubatches:
        inside = owner[part.tokens]
        assert (inside[0], inside[-1] + 1) == (part.requests.start, part.requests.stop)


@given(tokens=st.integers(4, 40), padding=st.integers(0, 5), dim=st.integers(0, 1))
def test_slicing_and_merging_give_the_tensor_back(tokens: int, padding: int, dim: int) -> None:
    split = split_at([tokens], [tokens // 3, tokens // 2 + 1])
    tensor = torch.arange(3.0 * (tokens + padding)).view(-1, 3)
    tensor = tensor if dim == 0 else tensor.t()
    parts = split.slice(tensor, dim)
    assert torch.equal(split.merge([p for p in parts if p is not None], dim), tensor)
    assert split.slice(None) == [None, None, None]
