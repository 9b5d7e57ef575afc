"""Drafts from the text, compared with a definition that tries every position."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_davinci.core.spec_decode.drafters import NGRAM, with_own_drafter
from vllm_davinci.core.spec_decode.ngram import NgramProposer, find_ngram


def found_by_definition(tokens: list[int], shortest: int, longest: int) -> int | None:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for begin in range(len(tokens) - length):
            if tokens[begin : begin + length] == tokens[-length:]:
                return begin + length
    return None


@pytest.mark.parametrize("seed", range(300))
def test_the_longest_ngram_is_found_at_its_earliest_place(seed: int):
    draw = random.Random(seed)
    tokens = [draw.randrange(1 + seed % 4) for _ in range(draw.randrange(14))]
    shortest = draw.randint(1, 3)
    longest = draw.randint(shortest, 5)
    assert find_ngram(np.array(tokens, dtype=np.int32), shortest, longest) == found_by_definition(
        tokens, shortest, longest
    )


def proposer(max_model_len: int = 64, **changes: Any) -> NgramProposer:
    asked = {"prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**asked | changes),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )
    return NgramProposer(config)


def drafts(proposer: NgramProposer, rows: list[list[int]], sampled: list[list[int]]) -> list[Any]:
    table = np.zeros((len(rows) + 2, 64), dtype=np.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    lengths = np.array([len(row) for row in rows] + [0, 0], dtype=np.int32)
    return proposer.propose(sampled, lengths, table, slot_mappings=None)


def test_drafts_are_what_followed_and_requests_that_sampled_nothing_get_none():
    repeated = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    rows = [repeated, repeated, [9, 8, 7]]
    assert drafts(proposer(), rows, [[3], [], [7]]) == [[4, 5, 6, 7], [], []]


def test_drafts_end_with_the_text_and_with_the_model_s_length():
    repeated = [1, 2, 3, 1, 2]
    assert drafts(proposer(), [repeated], [[2]]) == [[3, 1, 2]]
    assert drafts(proposer(max_model_len=7), [repeated], [[2]]) == [[3, 1]]
    assert drafts(proposer(max_model_len=5), [repeated], [[2]]) == [[]]


def test_only_the_runner_gets_our_class():
    config: Any = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram", model="ngram"))
    told = with_own_drafter(config)
    assert (told.speculative_config.method, told.speculative_config.model) == (
        "custom_class",
        NGRAM,
    )
    assert config.speculative_config.method == "ngram"
    for other in (None, SimpleNamespace(method="custom_class", model="a.B")):
        config.speculative_config = other
        assert with_own_drafter(config) is config
