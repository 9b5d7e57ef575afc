"""Inputs of drafters, compared with definitions that work request by request."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_davinci.core.spec_decode import drafting
from vllm_davinci.core.spec_decode.drafting import REJECTED

VOCABULARY = 50


def on_npu(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).npu()


@pytest.mark.parametrize("seed", range(5))
def test_the_newest_token_and_how_many_a_request_has_got(seed: int):
    draw = random.Random(seed)
    rows, width = 7, 4
    sampled = []
    for _ in range(rows):
        count = draw.randint(0, width)
        tokens = [draw.randrange(VOCABULARY) for _ in range(count)]
        sampled.append(tokens + [REJECTED] * (width - count))
    sampled[2] = [VOCABULARY, REJECTED, REJECTED, REJECTED]  # no token of the vocabulary
    discarded = [draw.random() < 0.3 for _ in range(rows)]
    known = [100 + row for row in range(rows + 2)]
    newest, counts = on_npu([0] * rows), on_npu([0] * rows)
    drafting.next_tokens(
        torch.tensor(sampled, dtype=torch.int32).npu(),
        torch.tensor([*discarded, True, True]).npu(),
        on_npu(known),
        newest,
        counts,
        VOCABULARY,
        width,
        rows,
        width,
        4,
    )
    for row, tokens in enumerate(sampled):
        valid = [token for token in tokens if 0 <= token < VOCABULARY]
        if discarded[row] or not valid:
            assert (counts[row], newest[row]) == (0, known[row])
        else:
            assert (counts[row], newest[row]) == (len(valid), valid[-1])


def test_the_row_of_the_newest_token_lies_before_the_drafts_that_were_not_kept():
    num_drafts, counts, lengths = [2, 0, 3, 1], [1, 1, 4, 2], [3, 7, 4, 2]
    ends = torch.tensor(num_drafts).cumsum(0).to(torch.int32).npu()
    starts = on_npu([0, *torch.tensor(lengths).cumsum(0).tolist()])
    places, rejected = on_npu([0] * 4), on_npu([0] * 4)
    drafting.places_to_sample(ends, on_npu(counts), starts, places, rejected, 4)
    assert rejected.tolist() == [2, 0, 0, 0]
    assert places.tolist() == [0, 9, 13, 15]


def test_the_next_positions_have_slots_until_the_model_s_length():
    table = torch.tensor([[3, 5, 7], [2, 4, 6], [1, 8, 9]], dtype=torch.int32).npu()
    positions = on_npu([3, 6, 11], torch.int64)
    lengths = on_npu([4, 7, 12, 77])
    moved, slots = on_npu([0] * 3, torch.int64), on_npu([5] * 5, torch.int64)
    drafting.next_positions(positions, table, 3, lengths, moved, slots, 4, 12, 3, -1, 3)
    assert moved.tolist() == [4, 7, 0]
    assert slots.tolist() == [5 * 4 + 0, 4 * 4 + 3, -1, -1, -1]
    assert lengths.tolist() == [5, 8, 1, 77]


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("shifts", [False, True])
def test_new_tokens_stand_after_those_that_count(num_new: int, shifts: bool):
    lengths, rejected = [3, 1, 4], [1, 0, 2]
    number = sum(lengths)
    starts = [0, 3, 4, 8]
    tokens = [10 + n for n in range(number)]
    positions = [5, 6, 7, 0, 20, 21, 22, 23]
    newest = [91, 92, 93]
    padding, mask = 0, 99
    expected: list[list[int]] = []  # token, position, is rejected, is masked
    places, hidden = [], []
    for row, length in enumerate(lengths):
        own = tokens[starts[row] : starts[row] + length - rejected[row]][int(shifts) :]
        begin = len(expected)
        places += [begin + len(own) + offset for offset in range(num_new)]
        hidden += [begin + offset for offset in range(length)]
        texts = [*own, newest[row], *[mask] * (num_new - 1)]
        for offset, token in enumerate(texts):
            masked = int(len(own) < offset)
            expected.append([token, positions[starts[row]] + offset, 0, masked])
        expected += [[padding, 0, 1, 0]] * rejected[row]
    size = len(expected) + 2
    out = [on_npu([7] * size), on_npu([7] * size, torch.int64)]
    masks = [torch.zeros(size, dtype=torch.bool, device="npu") for _ in range(2)]
    new_places, hidden_places = on_npu([0] * 3 * num_new), on_npu([0] * number)
    drafting.with_new_tokens(
        on_npu(tokens),
        on_npu(positions, torch.int64),
        on_npu(newest),
        *out,
        *masks,
        new_places,
        hidden_places,
        on_npu(starts),
        on_npu([starts[row + 1] - 1 - rejected[row] for row in range(3)]),
        padding,
        mask,
        number,
        num_new,
        shifts,
        8,
    )
    found = torch.stack([each[: len(expected)].cpu().to(torch.int64) for each in (*out, *masks)])
    assert found.T.tolist() == expected
    assert [each[len(expected) :].tolist() for each in out] == [[7, 7], [7, 7]]
    assert new_places.tolist() == places
    if shifts:
        assert hidden_places.tolist() == hidden
