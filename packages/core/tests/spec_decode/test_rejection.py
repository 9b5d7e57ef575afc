"""Accepted drafts, compared with a definition that works request by request and draft by draft."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_davinci.core.spec_decode import rejection
from vllm_davinci.core.spec_decode.rejection import REJECTED
from vllm_davinci.vnpu import _C

VOCABULARY = 7
COUNTS = [3, 0, 1, 4, 2, 4]  # number of drafts per request
NUM_DRAFTS = sum(COUNTS)
LONGEST = max(COUNTS)


def ends(counts: list[int] = COUNTS) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32).npu()


def kept_by_definition(
    counts: list[int], kept: list[bool], tokens: list[int], bonus: list[int], longest: int
) -> list[list[int]]:
    """Each request's tokens up to the first rejected draft, or the bonus token after all."""
    rows, number = [], 0
    for count, extra in zip(counts, bonus, strict=True):
        row = []
        for place in range(number, number + count):
            row.append(tokens[place])
            if not kept[place]:
                break
        else:
            row.append(extra)
        rows.append(row + [REJECTED] * (longest + 1 - len(row)))
        number += count
    return rows


def greedy(counts: list[int], seed: int, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Calls the stand-in with random inputs. Returns its output, and its input."""
    draw = random.Random(seed)
    number, longest = sum(counts), max(counts)
    given: dict[str, Any] = {
        "drafts": [draw.randrange(3) for _ in range(number)],
        "greatest": [draw.randrange(3) for _ in range(number)],
        "bonus": [draw.randrange(VOCABULARY) for _ in counts],
        "longest": longest,
    }
    output = torch.full((len(counts), longest + 1), REJECTED, dtype=torch.int32, device="npu")
    rejection.keep_greedy(
        output,
        ends(counts),
        torch.tensor(given["drafts"], dtype=torch.int32).npu(),
        torch.tensor(given["greatest"], dtype=torch.int64).npu(),
        torch.tensor(given["bonus"], dtype=torch.int32).unsqueeze(1).npu(),
        options.get("is_greedy"),
        longest,
        options.get("uniform"),
        options.get("rates"),
        "rates" in options,
    )
    return output.tolist(), given


@pytest.mark.parametrize("counts", [COUNTS, [1], [0, 0], [2, 2], [4] * 33])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_drafts_are_accepted_while_they_are_the_greatest(counts: list[int], seed: int):
    output, given = greedy(counts, seed)
    kept = [a == b for a, b in zip(given["drafts"], given["greatest"], strict=True)]
    assert output == kept_by_definition(
        counts, kept, given["greatest"], given["bonus"], given["longest"]
    )


def test_rows_of_random_requests_are_left_to_the_other_stand_in():
    is_greedy = torch.tensor([True, False] * 3).npu()
    output, given = greedy(COUNTS, 5, is_greedy=is_greedy)
    everywhere, _ = greedy(COUNTS, 5)
    untouched = [REJECTED] * (given["longest"] + 1)
    assert output == [row if n % 2 == 0 else untouched for n, row in enumerate(everywhere)]


def test_synthetic_rates_keep_drafts_whatever_the_target_says():
    uniform = torch.rand(NUM_DRAFTS, generator=torch.Generator().manual_seed(1))
    rates = torch.tensor([0.9, 0.5, 0.4, 0.3])
    output, given = greedy(COUNTS, 6, uniform=uniform.npu(), rates=rates.npu())
    places = [place for count in COUNTS for place in range(count)]
    kept = [bool(uniform[n] < rates[place]) for n, place in enumerate(places)]
    pairs = zip(kept, given["drafts"], given["greatest"], strict=True)
    tokens = [draft if is_kept else token for is_kept, draft, token in pairs]
    assert output == kept_by_definition(COUNTS, kept, tokens, given["bonus"], LONGEST)


@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_random_drafts_are_kept_by_the_ratio_of_probabilities(has_draft_probs: bool):
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(NUM_DRAFTS, VOCABULARY, generator=generator).softmax(dim=1)
    draft = (3 * torch.rand(NUM_DRAFTS, VOCABULARY, generator=generator)).softmax(dim=1)
    target[0, 0] = 0.0
    drafts = torch.randint(VOCABULARY, (NUM_DRAFTS,), generator=generator, dtype=torch.int32)
    drafts[0], drafts[4] = 0, REJECTED  # one that the target never accepts, one that is padding
    uniform = torch.rand(NUM_DRAFTS, generator=generator, dtype=torch.float64)
    uniform[0] = 0.0
    recovered = torch.randint(VOCABULARY, (NUM_DRAFTS,), generator=generator, dtype=torch.int32)
    bonus = torch.randint(VOCABULARY, (len(COUNTS), 1), generator=generator, dtype=torch.int32)
    output = torch.full((len(COUNTS), LONGEST + 1), REJECTED, dtype=torch.int32, device="npu")
    rejection.keep_random(
        output,
        ends(),
        drafts.npu(),
        draft.npu() if has_draft_probs else None,
        target.npu(),
        bonus.npu(),
        recovered.npu(),
        uniform.npu(),
        torch.zeros(len(COUNTS), dtype=torch.bool, device="npu"),
        LONGEST,
        VOCABULARY,
        None,
        not has_draft_probs,
        False,
    )
    kept = []
    for number, token in enumerate(drafts.tolist()):
        of_draft = float(draft[number, token]) if has_draft_probs else 1.0
        of_target = float(target[number, token])
        kept.append(token >= 0 and of_target > 0 and of_target / of_draft >= float(uniform[number]))
    assert any(kept) and not all(kept)
    pairs = zip(kept, drafts.tolist(), recovered.tolist(), strict=True)
    tokens = [mine if is_kept else other for is_kept, mine, other in pairs]
    expected = kept_by_definition(COUNTS, kept, tokens, bonus.flatten().tolist(), LONGEST)
    assert output.tolist() == expected


@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_recovered_tokens_come_from_what_the_target_has_more_of(has_draft_probs: bool):
    generator = torch.Generator().manual_seed(4)
    target = torch.rand(NUM_DRAFTS, VOCABULARY, generator=generator).softmax(dim=1)
    draft = torch.rand(NUM_DRAFTS, VOCABULARY, generator=generator).softmax(dim=1)
    drafts = torch.randint(VOCABULARY, (NUM_DRAFTS,), generator=generator, dtype=torch.int32)
    noise = torch.rand(len(COUNTS), VOCABULARY, generator=generator).reciprocal()
    output = torch.empty(NUM_DRAFTS, dtype=torch.int32, device="npu")
    rejection.recover(
        output,
        ends(),
        drafts.npu(),
        draft.npu() if has_draft_probs else None,
        target.npu(),
        noise.npu(),
        VOCABULARY,
        8192,
        not has_draft_probs,
        False,
    )
    requests = [request for request, count in enumerate(COUNTS) for _ in range(count)]
    for number, request in enumerate(requests):
        left = (target[number] - draft[number]).clamp(min=0)
        if not has_draft_probs:
            left = target[number].clone()
            left[drafts[number]] = 0
        assert output[number] == (left * noise[request]).argmax()


def test_values_of_requests_are_those_of_their_drafts():
    output = torch.empty(NUM_DRAFTS, device="npu")
    values = torch.tensor([0.5, 9.0, 0.0, 0.7, 0.0, 0.2]).npu()
    rejection.expand(output, values, ends(), 0, 1, 128)
    expected = [[0.5] * 3, [], [1.0], [0.7] * 4, [1.0] * 2, [0.2] * 4]
    assert output.cpu().tolist() == pytest.approx([value for row in expected for value in row])


# --- through vLLM's sampler --------------------------------------------------------------------

DRAWS = 20_000
# Chi-square with 2 * 5 - 1 degrees of freedom: one draw in 100 exceeds this value.
LIMIT = 42.98  # 24 degrees of freedom, of 25 pairs of tokens
CHOICES = 5


def random_metadata(rows: int) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=torch.ones(rows, device="npu"),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows, device="npu"),
        presence_penalties=torch.zeros(rows, device="npu"),
        repetition_penalties=torch.ones(rows, device="npu"),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@pytest.fixture
def registered() -> None:
    from vllm_davinci.core.platform import NPUPlatform

    NPUPlatform.register_triton_kernel_overrides()


@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_two_tokens_are_distributed_as_the_target_would_draw_them(
    has_draft_probs: bool, registered: None
):
    """The first token by acceptance or recovery, the second from the target after the first."""
    torch.npu.manual_seed(11)
    generator = torch.Generator().manual_seed(8)
    first = torch.rand(CHOICES, generator=generator).mul(2).softmax(dim=0)
    draft = torch.rand(CHOICES, generator=generator).mul(3).softmax(dim=0)
    chosen = torch.multinomial(draft, DRAWS, replacement=True, generator=generator)
    after = torch.rand(CHOICES, CHOICES, generator=generator).mul(2).softmax(dim=1)
    bonus = torch.multinomial(after[chosen], 1, generator=generator)
    output = rejection_sampler.rejection_sample(
        chosen.to(torch.int32).npu(),
        [1] * DRAWS,
        1,
        torch.arange(1, DRAWS + 1, dtype=torch.int32).npu(),
        draft.expand(DRAWS, CHOICES).contiguous().npu() if has_draft_probs else None,
        first.log().expand(DRAWS, CHOICES).contiguous().npu(),
        bonus.to(torch.int32).npu(),
        random_metadata(DRAWS),
    ).cpu()
    # If the draft was rejected, the next step draws the second token.
    recovered = output[:, 0].to(torch.int64)
    drawn = torch.multinomial(after[recovered], 1, generator=generator).squeeze(1)
    second = torch.where(output[:, 1] == REJECTED, drawn, output[:, 1].to(torch.int64))
    if not has_draft_probs:
        # A draft with probability 1 is accepted with the target's probability.
        kept = (output[:, 1] != REJECTED).float().mean()
        assert kept == pytest.approx(float((draft * first).sum()), abs=0.02)
    observed = torch.bincount(recovered * CHOICES + second, minlength=CHOICES**2)
    expected = (first.unsqueeze(1) * after).flatten() * DRAWS
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < LIMIT


def test_the_host_waits_for_nothing(registered: None):
    counts = COUNTS
    arguments = (
        torch.randint(VOCABULARY, (NUM_DRAFTS,), dtype=torch.int32).npu(),
        counts,
        LONGEST,
        ends(),
        None,
        torch.randn(NUM_DRAFTS, VOCABULARY).npu(),
        torch.zeros(len(counts), 1, dtype=torch.int32, device="npu"),
        random_metadata(len(counts)),
    )
    torch.npu.synchronize()
    before = _C.host_counts()
    rejection_sampler.rejection_sample(*arguments)
    after = _C.host_counts()
    for name in ("synchronizations", "copies_to_host"):
        assert after[name] == before[name]
