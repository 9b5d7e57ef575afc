"""Tokens after drafts have the target's distribution, whatever the drafter proposes."""

import pytest
import torch

from vllm_davinci.core.triton_kernels.drafting import ngram_finalize
from vllm_davinci.core.triton_kernels.sampling import token_hashes
from vllm_davinci.core.triton_kernels.verification import (
    insert_resampled,
    keep_greedy,
    local_logits_stats,
    reject,
    resample,
)

VOCABULARY, DRAFTS, REQUESTS = 12, 2, 6000
# Upper 1/10,000 quantile of the chi-square distribution with 11 degrees of freedom.
CHI_SQUARE_11 = 37.4


def verified(
    target: torch.Tensor,
    drafter: torch.Tensor | None,
    drafts: torch.Tensor,
    temperature: float,
    rates: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies the same step for many requests with different seeds, launched like vLLM.

    target: [DRAFTS + 1, VOCABULARY]; drafter: [DRAFTS, VOCABULARY]; drafts: [REQUESTS, DRAFTS]
    """
    rows, all_rows, blocks = DRAFTS + 1, REQUESTS * (DRAFTS + 1), 2
    requests = torch.arange(REQUESTS)
    logits = (target / (temperature or 1.0)).repeat(REQUESTS, 1).npu()
    of_drafter, strides = None, (0, 0)
    if drafter is not None:
        of_drafter = drafter.expand(REQUESTS, -1, -1).contiguous().npu()
        strides = of_drafter.stride(0), of_drafter.stride(1)
    tokens = torch.nn.functional.pad(drafts, (1, 0)).to(torch.int32).view(-1).npu()
    slots, slot_of_row = requests.npu(), requests.repeat_interleave(rows).npu()
    places = torch.arange(rows, dtype=torch.int32).repeat(REQUESTS).npu()
    ends = (torch.arange(REQUESTS + 1) * rows).to(torch.int32).npu()
    positions = (torch.arange(rows) + 40).repeat(REQUESTS).npu()
    temperatures = torch.full((REQUESTS,), temperature).npu()
    seeds = (requests * 7919 + 13).npu()

    argmax = torch.empty(all_rows, blocks, dtype=torch.int64).npu()
    stats = [torch.empty(all_rows, blocks).npu() for _ in range(4)]
    of_blocks = [value for each in (argmax, *stats) for value in (each, blocks)]
    of_logits = logits, VOCABULARY, of_drafter, *strides
    rates = None if rates is None else rates.npu()
    local_logits_stats(
        *of_blocks, *of_logits, slot_of_row, places, temperatures, VOCABULARY, all_rows
    )
    sampled = torch.empty(REQUESTS, rows, dtype=torch.int64).npu()
    count = torch.empty(REQUESTS, dtype=torch.int32).npu()
    sums = torch.empty(REQUESTS).npu(), torch.empty(REQUESTS).npu()
    reject(
        *(sampled, rows, count, *sums, logits, VOCABULARY, *of_blocks[:6], tokens),
        *(of_drafter, *strides, *of_blocks[6:], ends, slots, temperatures, seeds, positions, rates),
        *(None, None, 0, None, 0.0, blocks),
    )
    drawn = torch.empty(REQUESTS, blocks, dtype=torch.int64).npu()
    maxima = torch.empty(REQUESTS, blocks).npu()
    resample(
        *(drawn, blocks, maxima, blocks, logits, VOCABULARY, sums[0], of_drafter, *strides),
        *(sums[1], count, ends, slot_of_row, tokens, temperatures, seeds, positions),
        *(None, None, 0, None, None, 0, 0, VOCABULARY),
    )
    insert_resampled(
        *(sampled, rows, count, drawn, blocks, maxima, blocks, blocks, ends),
        *(slot_of_row, temperatures),
    )
    return sampled.cpu(), count.cpu()


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * len(tokens)
    counted = torch.bincount(tokens, minlength=VOCABULARY)
    return float(((counted - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("knows_drafter", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_have_the_targets_distribution(knows_drafter: bool, temperature: float):
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(DRAFTS + 1, VOCABULARY, generator=generator)
    drafter = torch.randn(DRAFTS, VOCABULARY, generator=generator)
    proposed = (drafter / temperature).softmax(dim=1)
    drafts = torch.stack(
        [torch.multinomial(each, REQUESTS, True, generator=generator) for each in proposed], dim=1
    )
    if not knows_drafter:  # without the drafter's logits, vLLM treats a draft as certain
        drafts[:] = target[:DRAFTS].argmax(dim=1)
    sampled, count = verified(target, drafter if knows_drafter else None, drafts, temperature)
    wanted = (target / temperature).softmax(dim=1)
    assert chi_square(sampled[:, 0], wanted[0]) < CHI_SQUARE_11
    for place in range(1, DRAFTS + 1):
        there = sampled[count > place, place]
        assert len(there) > 200
        assert chi_square(there, wanted[place]) < CHI_SQUARE_11


def test_synthetic_rates_decide_alone():
    target = torch.zeros(DRAFTS + 1, VOCABULARY)
    drafts = torch.full((REQUESTS, DRAFTS), 5)
    for temperature in (0.0, 1.0):
        _, count = verified(target, None, drafts, temperature, torch.tensor([0.8, 0.5]))
        assert abs(float((count > 1).float().mean()) - 0.8) < 0.02
        assert abs(float((count > 2).float().mean()) - 0.4) < 0.02


def test_greedy_requests_get_the_greatest_logits_up_to_the_first_that_was_not_drafted():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 4, (9, VOCABULARY), generator=generator).float()  # many are equal
    ends, greatest = [0, 3, 4, 9], logits.argmax(dim=1).tolist()
    drafts = [1, greatest[0], greatest[1], 7, 2, greatest[4], -1, greatest[6], greatest[7]]
    tokens, count = keep_greedy(
        logits.npu(),
        torch.tensor(drafts, dtype=torch.int32).npu(),
        torch.tensor(ends, dtype=torch.int32).npu(),
        4,
    )
    assert count.tolist() == [3, 1, 2]
    assert tokens[0, :3].tolist() == greatest[:3]
    assert tokens[1, :1].tolist() == greatest[3:4]
    assert tokens[2, :2].tolist() == greatest[4:6]


def test_drafts_follow_the_ngrams_match_then_repeat_the_newest_token():
    tokens = torch.tensor([[5, 6, 7, 8, 5, 6, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]], dtype=torch.int32)
    longest = tokens.shape[1]
    scores = torch.zeros(3, 4, dtype=torch.int64)
    scores[0, 2] = 2 * (longest + 1) + 0 + 1  # two tokens, at position 0
    drafts = torch.zeros(3, 5, dtype=torch.int64).npu()
    ngram_finalize(
        tokens.npu(),
        longest,
        torch.tensor([0, 1, 0]).npu(),
        torch.tensor([6, 4], dtype=torch.int32).npu(),
        torch.tensor([1, 1, 0], dtype=torch.int32).npu(),
        torch.tensor([6, 4]).npu(),
        scores.npu(),
        4,
        drafts,
        longest,
        4,
        5,
    )
    assert drafts.tolist() == [[7, 8, 5, 6, 6], [4] * 5, [6] * 5]


def test_positions_of_32_bits_have_the_same_hashes():
    seeds = torch.tensor([0, 7, -1, 2**40]).npu()
    positions = torch.tensor([0, 1, 5, 2**31 - 1]).npu()
    expected = token_hashes(seeds, positions, VOCABULARY)
    assert torch.equal(token_hashes(seeds, positions.to(torch.int32), VOCABULARY), expected)
