"""Engines' answers in every kind of step, and their comparison."""

from vllm import SamplingParams

from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.split_engines import random_prompts

# For one prompt: each token, with its logprob and the likeliest tokens' logprobs.
Answer = list[tuple[int, dict[int, float]]]
# Answers by kind of step.
Answers = dict[str, list[Answer]]

# Largest difference by splitting a step, in nats, if each layer rounds to 8 bits of mantissa.
TIE = 0.25


def answers_of(engine: DPEngines) -> Answers:
    """Returns an engine's answers in every kind of step. Cached prefixes have blocks of 128
    tokens.
    """
    prefix = random_prompts(9, [128])[0]
    sharing = [prefix + tail for tail in random_prompts(10, [3, 20, 41, 7])]
    kinds = {
        "prefill": (random_prompts(1, [100, 90, 60, 51]), 1),
        "mixed": (random_prompts(2, [5, 80, 150, 31, 1, 64, 129, 17]), 12),
        "filling": (sharing, 4),
        "cached": (sharing, 4),
        "padded": (random_prompts(3, [7, 4, 2, 2]), 6),
        "one": (random_prompts(4, [1, 1]), 3),
    }
    answers: Answers = {}
    for kind, (prompts, max_tokens) in kinds.items():
        outputs = engine.generate(
            prompts,
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2),
        )
        answers[kind] = [
            [
                (token, {candidate: entry.logprob for candidate, entry in step.items()})
                for token, step in zip(
                    output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                )
            ]
            for output in outputs
        ]
        if kind == "cached":
            assert all(output.num_cached_tokens == 128 for output in outputs)
    return answers


def tokens_of(answers: Answers) -> dict[str, list[list[int]]]:
    return {kind: [[token for token, _ in one] for one in of] for kind, of in answers.items()}


def assert_near(answers: Answers, expected: Answers) -> None:
    """Asserts equal tokens in 16 bits, up to a token that rounding makes as likely as another.

    After that token the texts are unrelated.
    """
    num_ties = num_prompts = 0
    for kind, of_kind in expected.items():
        for answer, reference in zip(answers[kind], of_kind, strict=True):
            num_prompts += 1
            for (token, _), (wanted, likely) in zip(answer, reference, strict=True):
                if token != wanted:
                    assert likely[wanted] - likely.get(token, -1e9) < TIE, (kind, token, likely)
                    num_ties += 1
                    break
    assert num_ties < num_prompts / 4, f"{num_ties} of {num_prompts} prompts differ"
