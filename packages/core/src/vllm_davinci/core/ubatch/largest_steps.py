"""The largest steps of each kind that an engine can run, and their device memory.

vLLM's profile run is a step of prompts, whole and without attention. A step in ubatches may take
more, since it holds the tensors of several ubatches, such as gathered rows, at the same time.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
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
        self, query_lens: tuple[int, ...], seq_lens: torch.Tensor, is_mixed: bool
    ) -> None:
        """Runs an eager step, as planned, over the existing cache."""


@dataclass(frozen=True)
class LargestStep:
    """One of the largest steps.

    query_lens:  new tokens of each request, decodes first
    is_mixed:    all but the last request decode
    first_share: fraction of tokens in the first ubatch; None: the step is whole
    """

    query_lens: tuple[int, ...]
    is_mixed: bool
    first_share: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def __str__(self) -> str:
        kind = "decodes and a prompt" if self.is_mixed else "prompts"
        form = "whole" if self.first_share is None else f"cut at {self.first_share:.0%}"
        return f"{self.num_tokens} tokens of {kind}, {form}"

    def run(self, runner: StepRunner) -> None:
        """Runs it over the existing cache; reads block 0 and writes nothing."""
        lens = torch.tensor(self.query_lens)
        num_prefills = 1 if self.is_mixed else len(lens)
        context = torch.full_like(lens, -(-CONTEXT_TOKENS // num_prefills))
        if self.is_mixed:
            context[:-1] = 0
        seq_lens = (lens + context).clamp(max=runner.max_model_len).int()
        share, splitter = self.first_share, runner.splitter
        split = nullcontext() if share is None else splitter.as_if_real(share)
        with split:
            runner.run_dummy_step(self.query_lens, seq_lens, self.is_mixed)
        torch.accelerator.synchronize()


def largest_steps(runner: StepRunner, slots: int | None = None) -> Iterator[LargestStep]:
    """Whole steps of prompts, and of decodes with a prompt; then steps in ubatches, if any.

    slots: tokens that the cache holds; None: enough for any step
    """
    most = runner.max_num_tokens if slots is None else min(runner.max_num_tokens, slots)
    for is_mixed in (False, True):
        if (lens := _query_lens(runner, most, is_mixed)) is not None:
            yield LargestStep(lens, is_mixed)
    for is_mixed in (False, True):
        for share in runner.splitter.first_shares():
            if (lens := _largest_split(runner, most, is_mixed, share)) is not None:
                yield LargestStep(lens, is_mixed, share)


def _query_lens(runner: StepRunner, most: int, is_mixed: bool) -> tuple[int, ...] | None:
    """The largest step of at most `most` tokens, as vLLM's `_dummy_run` deals them out; None if
    there is no step of that kind."""
    requests, longest = runner.max_num_reqs, runner.max_model_len
    if is_mixed:
        total = min(most, longest + min(requests - 1, longest))
        decodes = min(requests - 1, total // 2)
        return (*[1] * decodes, total - decodes) if decodes > 0 else None
    total = min(most, longest * requests)
    requests = min(total, requests)
    each, rest = divmod(total, requests)
    return (*[each] * (requests - 1), each + rest if each + rest <= longest else each)


def _largest_split(
    runner: StepRunner, most: int, is_mixed: bool, share: float
) -> tuple[int, ...] | None:
    while most > 1:
        lens = _query_lens(runner, most, is_mixed)
        if lens is None:
            return None
        if runner.splitter.would_split(lens, share):
            return lens
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
