"""An engine's largest steps are within its limits, and cut by its policy."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.ubatch.decisions import Decisions
from vllm_davinci.core.ubatch.largest_steps import largest_steps
from vllm_davinci.core.ubatch.splitter import StepSplitter


def splitter(ranks: int = 2, query_len: int = 1, **options: Any) -> StepSplitter:
    """A splitter that decides like an engine with these options; it has no device."""
    made = StepSplitter.__new__(StepSplitter)
    made._options = DualBatchConfig(enabled=True, **options)
    made._parallel = SimpleNamespace(tensor_parallel_size=ranks, data_parallel_size=1)
    made.decode_query_len = query_len
    made._is_causal = True
    made._tries = False
    scheduler = components.stream_scheduler()
    assert scheduler is not None
    made._decisions = Decisions(scheduler, made._options, ranks > 1)
    return made


def steps(tokens: int, requests: int, length: int, of: StepSplitter) -> list[Any]:
    runner = SimpleNamespace(
        max_num_tokens=tokens, max_num_reqs=requests, max_model_len=length, splitter=of
    )
    return list(largest_steps(runner))  # type: ignore[arg-type]


def dealt_by_vllm(num_tokens: int, max_num_seqs: int, step: Any, query_len: int) -> tuple[int, ...]:
    """Returns the requests that vLLM's `_dummy_run` makes."""
    if step.num_decodes == len(step.query_lens):
        requests = min(max_num_seqs, -(-num_tokens // query_len))
        rest = num_tokens % query_len
        return (*[query_len] * (requests - 1), rest or query_len)
    if step.num_decodes:
        decodes = min(max_num_seqs - 1, num_tokens // 2)
        return (*[1] * decodes, num_tokens - decodes)
    requests = min(num_tokens, max_num_seqs)
    each, rest = divmod(num_tokens, requests)
    return (*[each] * (requests - 1), each + rest)


@pytest.mark.parametrize(("split", "query_len"), [("request", 1), ("token", 3)])
def test_steps_are_within_the_limits_and_distributed_as_in_vllms_dummy_run(split, query_len):
    least = {"min_total_tokens_to_split": 8, "min_prefill_tokens_to_split": 2}
    of = splitter(query_len=query_len, split=split, **least)
    limits = itertools.product((1, 7, 64, 1000, 16384), (1, 2, 3, 16, 300), (8, 100, 4096))
    for tokens, requests, length in limits:
        for step in steps(tokens, requests, length, of):
            assert step.num_tokens <= tokens and len(step.query_lens) <= requests
            assert max(step.query_lens) <= length
            dealt = dealt_by_vllm(step.num_tokens, requests, step, query_len)
            assert step.query_lens == dealt, (tokens, requests, length)


def test_there_is_one_of_each_kind() -> None:
    of = splitter(
        query_len=2,
        split="token",
        decode=True,
        min_decode_tokens_to_split=4,
        min_total_tokens_to_split=4,
    )
    found = {(str(step), step.query_lens) for step in steps(16384, 4, 8192, of)}
    kinds = {
        "16384 tokens of prompts": (4096,) * 4,
        "8195 tokens of decodes and a prompt": (1, 1, 1, 8192),
        "8 tokens of decodes": (2,) * 4,
    }
    forms = ("whole", "cut at 50%")
    assert found == {(f"{kind}, {form}", lens) for kind, lens in kinds.items() for form in forms}


def test_cuts_between_requests_lie_in_the_middle_and_as_far_from_it_as_they_may() -> None:
    shares = {step.first_share for step in steps(16384, 64, 8192, splitter(imbalance_ratio=0.2))}
    assert shares == {None, 0.5, 0.7}
    assert splitter(first_share=0.57, split="token").first_shares() == (0.57,)


def test_nothing_is_cut_where_no_step_is() -> None:
    for of in (splitter(ranks=1), splitter(min_total_tokens_to_split=10**6)):
        assert {step.first_share for step in steps(16384, 4, 8192, of)} == {None}
    one_request = steps(4096, 1, 8192, splitter())  # no cut between requests
    assert [step.query_lens for step in one_request] == [(4096,), (1,)]


def test_dummy_runs_are_cut_meanwhile_alone() -> None:
    of = splitter(first_share=0.57, split="token")
    policy = of.policy
    with of.as_if_real(0.7):
        assert of.policy.first_share == 0.7 and of._tries
    assert of.policy == policy and not of._tries
    assert of.counts() == {}
