"""Tokens that only the device knows: their positions, and what they exclude."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from vllm_davinci.core.sampling.newest_tokens import NewestTokens, TokenHistory
from vllm_davinci.core.sampling.sampler import NO_TOKEN, NPUSampler, bad_word_ends
from vllm_davinci_testing.layers.greedy_metadata import greedy_metadata

VOCABULARY = 50


def step(
    device: torch.device, requests: list[str], outputs: list[list[int]], before: dict[str, int]
) -> Any:
    """The part of vLLM's input batch that the history reads. before: request -> sampled tokens"""
    sampled = torch.tensor(list(before.values()), device=device).unsqueeze(1)
    event = torch.npu.Event()
    event.record()
    return SimpleNamespace(
        req_ids=requests,
        prev_req_id_to_index={name: row for row, name in enumerate(before)},
        prev_sampled_token_ids=sampled,
        sampled_token_ids_cpu=sampled.cpu(),
        async_copy_ready_event=event,
        sampling_metadata=SimpleNamespace(output_token_ids=outputs),
    )


def test_older_tokens_are_filled_in_and_the_newest_stay_on_the_device(device: torch.device):
    history = TokenHistory()
    a, b, c = [3, -1], [-1], []
    newest = history.settle(step(device, ["a", "b", "c"], [a, b, c], {"a": 11, "b": 12}))
    assert (a, b, c) == ([3, -1], [-1], [])
    assert newest.known == [True, True, False]
    assert newest.tokens[:2].tolist() == [11, 12]
    for output in (a, b, c):
        output.append(-1)
    # The order of rows changes, b is not in the newest step, and d is new.
    d: list[int] = []
    newest = history.settle(
        step(device, ["c", "a", "d", "b"], [c, a, d, [*b[:-1], 12]], {"a": 21, "b": 22, "c": 23})
    )
    assert a == [3, 11, -1]
    assert newest.known == [True, True, False, False]
    assert newest.tokens[:2].tolist() == [23, 21]
    history.forget()
    a.append(-1)
    history.settle(step(device, ["a"], [a], {"a": 31}))
    assert a == [3, 11, -1, -1]


@pytest.mark.parametrize(
    ("words", "output", "newest", "expected"),
    [
        ([[5]], [], 0, [(0, 5, NO_TOKEN)]),
        ([[5, 6]], [], 0, []),
        ([[5, 6]], [5], 0, [(0, 6, NO_TOKEN)]),
        ([[5, 6]], [4], 0, []),
        ([[5, 6]], [1, -1], 5, [(0, 6, 5)]),
        ([[4, 5, 6]], [4, -1], 5, [(0, 6, 5)]),
        ([[4, 5, 6]], [3, -1], 5, []),
        ([[5, 6], [7]], [-1], 5, [(0, 6, 5), (0, 7, NO_TOKEN)]),
    ],
)
def test_bad_words_end_where_their_beginning_stands(
    words: list[list[int]],
    output: list[int],
    newest: int,
    expected: list[tuple[int, int, int]],
    device: torch.device,
):
    assert list(bad_word_ends({0: words}, [output])) == expected
    known = [newest if token == -1 else token for token in output]
    logits = torch.randn(1, VOCABULARY, device=device)
    reference = logits.clone()
    apply_bad_words(reference, {0: words}, [known])
    sampler = NPUSampler()
    sampler.newest = NewestTokens(torch.tensor([newest], device=device), [True])
    found = sampler.apply_logits_processors(logits, metadata({0: words}, [output], device), False)
    assert torch.equal(found, reference)


def test_penalties_count_the_newest_tokens(device: torch.device):
    outputs = [[3, 3, -1], [], [7, 8, 9, 1], [-1]]
    newest = torch.tensor([3, 4, 5, 6], device=device)
    known = [True, False, False, True]
    complete = [[3, 3, 3], [], [7, 8, 9, 1], [6]]
    made = metadata({}, outputs, device, penalties=True)
    logits = torch.randn(4, VOCABULARY, device=device)
    expected = apply_all_penalties(
        logits.clone(),
        made.prompt_token_ids,
        made.presence_penalties,
        made.frequency_penalties,
        made.repetition_penalties,
        complete,
    )
    sampler = NPUSampler()
    sampler.newest = NewestTokens(newest, known)
    assert torch.equal(sampler.apply_penalties(logits, made, outputs), expected)


def metadata(
    bad_words: dict[int, list[list[int]]],
    outputs: list[list[int]],
    device: torch.device,
    penalties: bool = False,
) -> Any:
    each = torch.linspace(0.1, 0.6, len(outputs), device=device)
    return greedy_metadata(
        outputs,
        device,
        no_penalties=not penalties,
        prompt_token_ids=torch.full((len(outputs), 2), 4, device=device),
        frequency_penalties=each,
        presence_penalties=each * 2,
        repetition_penalties=1 + each,
        bad_words_token_ids=bad_words,
    )
