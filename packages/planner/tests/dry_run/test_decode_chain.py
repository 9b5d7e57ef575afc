"""Chains of shrinking decode batches: lengths, sizes, and sizes that are missing."""

from typing import Any

import pytest

from vllm_davinci.planner.dry_run.decode_chain import DecodeChain
from vllm_davinci.planner.dry_run.stack import StepTime
from vllm_davinci.planner.dry_run.step import Step
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import Report

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def report_of(host_ps: int, waited_ps: int) -> Report:
    return Report(host_ps, waited_ps, 0, 0, 0, 0, 0, 0, {})


class Engine:
    """Prefills 64 tokens per step before any decode. A step takes 10 ps per request, 4 of them
    waited for by the host.

    most: maximum number of requests in a decode step
    """

    def __init__(self, drafts: int = 0, most: int | None = None) -> None:
        self.most_together = most
        self.context: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.query_len = 1 + drafts

    def add(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        self.context[name], self.most[name] = prompt_tokens, output_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.context[name]

    def run(self) -> tuple[Any, list[Any]]:
        room, tokens = 64, []
        for name, left in self.context.items():
            if 0 < left <= room:
                room -= left
                tokens.append(left)
                self.context[name] = 0
        if not tokens:
            tokens = ([self.query_len] * len(self.context))[: self.most_together]
            self.most = {name: self.most[name] - self.query_len for name in self.context}
            self.context = {name: 0 for name in self.context if self.most[name] > 0}
        return Step(tuple(tokens), report_of(10 * len(tokens), 4 * len(tokens)), 0.0), []


@pytest.mark.parametrize("drafts", [0, 2])
def test_each_size_has_its_time_by_its_tokens(drafts: int):
    chain = DecodeChain(longest=400, cache_tokens=10**6, batched_tokens=64, query_len=1 + drafts)
    engine: Any = Engine(drafts)
    assert chain.durations(engine, engine, [1, 4, 16]) == {
        size * (1 + drafts): StepTime(size, 10 * size, 6 * size) for size in (1, 4, 16)
    }
    assert not engine.context  # the chain ends without requests


def test_short_requests_have_shorter_prompts_and_then_fewer_sizes():
    assert DecodeChain(4096, 10**6, 8192, 1).context(SIZES) == 128
    short = DecodeChain(64, 10**6, 8192, 1)
    assert 0 < short.context(SIZES) < 33 and short.sizes_with_room(SIZES) == SIZES
    shorter = DecodeChain(24, 10**6, 8192, 1)
    assert shorter.sizes_with_room(SIZES) == SIZES[:5]
    assert DecodeChain(4096, 256 * 300, 8192, 1).context(SIZES) == 300 - 256


def test_requests_that_end_too_early_say_what_to_change():
    engine: Any = Engine()
    with pytest.raises(DryRunError, match="--max-model-len"):
        DecodeChain(4, 10**6, 8192, 1).durations(engine, engine, [1])


def test_requests_that_do_not_decode_together_say_what_to_change():
    engine: Any = Engine(most=3)
    chain = DecodeChain(longest=400, cache_tokens=10**6, batched_tokens=64, query_len=1)
    with pytest.raises(DryRunError, match=r"4 requests never decoded together.*--max-num-seqs"):
        chain.durations(engine, engine, [2, 4])
