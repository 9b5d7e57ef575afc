"""Drafts with recurrent state: rejected drafts leave no trace, for any method and number."""

import json
from collections.abc import Callable

import pytest

from vllm_davinci_testing.engines.drafters import GUESSING, TEXTS, WRONG
from vllm_davinci_testing.engines.preemption import few_blocks
from vllm_davinci_testing.engines.speculating import (
    RACES,
    generate,
    greedy,
    speculation,
    texts,
    told,
)
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

THOROUGH = pytest.mark.thorough
DENSE, NEXT = "qwen3_5_dense", "qwen3_next_moe"
GRAPHS = {"enforce_eager": False}
CHUNKS = {"max_num_batched_tokens": 48}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
Reference = Callable[[str], TransformersReference]


def assert_exact(reference: TransformersReference, found: list[list[int]]) -> None:
    wrong = [
        reference.first_difference(text["prompt_token_ids"], tokens)
        for text, tokens in zip(texts(), found, strict=True)
    ]
    assert not any(wrong), wrong


@pytest.mark.parametrize(
    ("model", "drafter", "options"),
    [
        pytest.param(DENSE, GUESSING, GRAPHS, id="graphs", marks=pytest.mark.nightly("layouts")),
        pytest.param(DENSE, GUESSING, {}, id="eager", marks=THOROUGH),
        pytest.param(NEXT, WRONG, CHUNKS, id="chunks_of_other_lengths", marks=THOROUGH),
        pytest.param(DENSE, GUESSING, {**TWO_RANKS, **GRAPHS}, id="tensor2", marks=THOROUGH),
        *(
            pytest.param(model, GUESSING, {**GRAPHS, **CHUNKS}, id=model, marks=THOROUGH)
            for model in ("nemotron_h", "granite_hybrid_moe")
        ),
    ],
)
def test_drafts_change_no_token(model, drafter, options, zoo, reference, start_engine, tmp_path):
    network = reference(model)
    prompts = [text["prompt_token_ids"] for text in texts()]
    answers = [network.greedy(each, greedy(n).max_tokens or 0) for n, each in enumerate(prompts)]
    known = tmp_path / "texts.json"
    known.write_text(json.dumps([p + a for p, a in zip(prompts, answers, strict=True)]))
    asked = {**speculation("custom_class", 3, model=drafter), **options}
    with start_engine(zoo(model), environment={**RACES, TEXTS: str(known)}, **asked) as engine:
        found = generate(engine)
        drafted, accepted = told(engine)
    assert_exact(network, found)
    assert drafted > 300
    # Some steps accept all drafts, some none, most of them a part.
    assert (drafted / 4 if drafter == GUESSING else -1) < accepted < drafted * 3 / 4


@THOROUGH
def test_preempted_requests_resume_from_cached_states(zoo, reference, start_engine):
    """Preempted requests are recomputed in chunks; the last chunk is as long as a verification."""
    asked = {**speculation("custom_class", 3, model=WRONG), **GRAPHS, "max_num_batched_tokens": 36}
    with start_engine(zoo(DENSE), environment=RACES, **{**asked, **few_blocks(40)}) as engine:
        found = generate(engine)
        drafted, _ = told(engine)
        preemptions = engine.metrics()["vllm:num_preemptions"]
    assert_exact(reference(DENSE), found)
    assert drafted > 0 and preemptions > 0
