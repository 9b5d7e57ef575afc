"""The largest steps of each kind that an engine can run, and their device memory.

vLLM's profile run is a step of prompts, whole and without attention. A step in ubatches may take
more, since it holds the tensors of several ubatches, such as gathered rows, at the same time.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch_npu

from vllm_davinci.core.ubatch.splitter import StepSplitter

# Cached tokens that prefills attend to in addition to their own; more are gathered in chunks.
CONTEXT_TOKENS = 8192


class StepRunner(Protocol):
    """The members of vLLM's runner that a dummy step uses."""

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    splitter: StepSplitter

    def run_dummy_step(
        self, query_lens: tuple[int, ...], seq_lens: torch.Tensor, num_decodes: int
    ) -> None:
        """Runs an eager step, as planned, over the existing cache."""


@dataclass(frozen=True)
class LargestStep:
    """One of the largest steps.

    query_lens:  new tokens of each request, decodes first
    num_decodes: requests that decode: none, all but the last, or all
    first_share: fraction of tokens in the first ubatch; None: the step is whole
    """

    query_lens: tuple[int, ...]
    num_decodes: int
    first_share: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def __str__(self) -> str:
        kind = "decodes and a prompt" if self.num_decodes else "prompts"
        if self.num_decodes == len(self.query_lens):
            kind = "decodes"
        form = "whole" if self.first_share is None else f"cut at {self.first_share:.0%}"
        return f"{self.num_tokens} tokens of {kind}, {form}"

    def run(self, runner: StepRunner) -> None:
        """Runs it over the existing cache; reads block 0 and writes nothing."""
        lens = torch.tensor(self.query_lens)
        is_mixed = 0 < self.num_decodes < len(lens)
        readers = 1 if is_mixed else len(lens)
        context = torch.full_like(lens, -(-CONTEXT_TOKENS // readers))
        if is_mixed:
            context[:-1] = 0
        seq_lens = (lens + context).clamp(max=runner.max_model_len).int()
        share, splitter = self.first_share, runner.splitter
        split = nullcontext() if share is None else splitter.as_if_real(share)
        with split:
            runner.run_dummy_step(self.query_lens, seq_lens, self.num_decodes)
        torch.accelerator.synchronize()


def largest_steps(runner: StepRunner, slots: int | None = None) -> Iterator[LargestStep]:
    """Whole steps of prompts, of decodes with a prompt, and of decodes; then in ubatches, if any.

    slots: tokens that the cache holds; None: enough for any step
    """
    most = runner.max_num_tokens if slots is None else min(runner.max_num_tokens, slots)
    kinds = (_prompts, _mixed, _decodes)
    for deal in kinds:
        if (step := deal(runner, most)) is not None:
            yield step
    for deal in kinds:
        for share in runner.splitter.first_shares():
            if (step := _largest_split(runner, most, deal, share)) is not None:
                yield step


# Returns the largest step of one kind with at most that many tokens, with as many requests as in
# vLLM's `_dummy_run`; None if there is no such step.
_Deal = Callable[[StepRunner, int], LargestStep | None]


def _prompts(runner: StepRunner, most: int) -> LargestStep | None:
    longest = runner.max_model_len
    total = min(most, longest * runner.max_num_reqs)
    requests = min(total, runner.max_num_reqs)
    each, rest = divmod(total, requests)
    last = each + rest if each + rest <= longest else each
    return LargestStep((*[each] * (requests - 1), last), num_decodes=0)


def _mixed(runner: StepRunner, most: int) -> LargestStep | None:
    others, longest = runner.max_num_reqs - 1, runner.max_model_len
    total = min(most, longest + min(others, longest))
    decodes = min(others, total // 2)
    return LargestStep((*[1] * decodes, total - decodes), decodes) if decodes > 0 else None


def _decodes(runner: StepRunner, most: int) -> LargestStep | None:
    each = runner.splitter.decode_query_len
    requests = min(runner.max_num_reqs, most // each) if each <= runner.max_model_len else 0
    return LargestStep((each,) * requests, requests) if requests else None


def _largest_split(runner: StepRunner, most: int, deal: _Deal, share: float) -> LargestStep | None:
    while most > 1:
        step = deal(runner, most)
        if step is None:
            return None
        if runner.splitter.would_split(step.query_lens, share):
            return replace(step, first_share=share)
        most = min(most, step.num_tokens)
        most -= -(-most // 8)
    return None


def measure_steps(runner: StepRunner) -> int:
    """Most bytes that one of these steps allocates."""
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch_npu.npu.reset_peak_memory_stats()
    for step in largest_steps(runner):
        step.run(runner)
    return int(torch.accelerator.max_memory_allocated()) - int(before)
