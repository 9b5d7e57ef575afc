"""Greedy sampling without a float32 copy of the logits: when it applies, and equal tokens."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_davinci.core.sampling.sampler import NPUSampler
from vllm_davinci_testing.layers.greedy_metadata import greedy_metadata
from vllm_davinci_testing.layers.launch_counter import LaunchCounter

ROWS, VOCABULARY = 3, 700


def metadata(**changes: Any) -> SamplingMetadata:
    """Metadata of greedy requests without other options."""
    return greedy_metadata([[] for _ in range(ROWS)], torch.device("npu"), **changes)


def logits() -> torch.Tensor:
    """Each row has two greatest values: bfloat16 has few values."""
    rows = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))
    rows[:, 300] = rows[:, 650] = 9
    return rows.to(torch.bfloat16).npu()


def test_tokens_of_greedy_requests_are_those_of_vllm() -> None:
    ours = NPUSampler().forward(logits(), metadata())
    theirs = Sampler().forward(logits(), metadata())
    assert ours.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype == torch.int32
    assert ours.sampled_token_ids.tolist() == theirs.sampled_token_ids.tolist() == [[300]] * ROWS
    assert ours.logprobs_tensors is None


def test_only_the_greatest_logit_is_searched() -> None:
    rows, plain = logits(), metadata()
    with LaunchCounter() as counter:
        NPUSampler().forward(rows, plain)
    assert counter.names == ["aten::argmax", "aten::_to_copy"]


def test_a_processor_of_another_kind_is_asked() -> None:
    class Other:
        def is_argmax_invariant(self) -> bool:
            return False

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            logits[:, 5] += 100
            return logits

    processors = LogitsProcessors()
    processors.non_argmax_invariant.append(Other())
    sampled = NPUSampler().forward(logits(), metadata(logitsprocs=processors)).sampled_token_ids
    assert sampled.tolist() == [[5]] * ROWS


def test_processors_that_change_logits_are_called() -> None:
    device = torch.device("npu")
    config = VllmConfig()
    bias = LogitBiasLogitsProcessor(config, device, is_pin_memory=False)
    tokens = MinTokensLogitsProcessor(config, device, is_pin_memory=False)
    both = metadata(logitsprocs=LogitsProcessors([bias, tokens]))
    assert NPUSampler().forward(logits(), both).sampled_token_ids.tolist() == [[300]] * ROWS
    row = torch.tensor([1], dtype=torch.int32, device=device)
    bias.biases = {1: {5: 100.0}}
    bias.bias_tensor = torch.tensor([100.0], device=device)
    bias.logits_slice = (row, row + 4)
    assert NPUSampler().forward(logits(), both).sampled_token_ids.tolist() == [[300], [5], [300]]
    bias.biases = {}
    tokens.min_toks = {2: (4, [], {300}, False)}
    tokens.logits_slice = (row + 1, row + 299)
    assert NPUSampler().forward(logits(), both).sampled_token_ids.tolist() == [[300], [300], [650]]


def test_repeated_and_forbidden_tokens_are_not_taken() -> None:
    twice = metadata(
        no_penalties=False,
        prompt_token_ids=torch.full((ROWS, 1), 4, device="npu"),
        frequency_penalties=torch.ones(ROWS, device="npu"),
        output_token_ids=[[300], [], [300]],
    )
    sampled = NPUSampler().forward(logits(), twice).sampled_token_ids
    assert sampled.tolist() == [[650], [300], [650]]
    forbidden = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    forbidden[1, 300] = True
    sampled = (
        NPUSampler()
        .forward(logits(), metadata(allowed_token_ids_mask=forbidden.npu()))
        .sampled_token_ids
    )
    assert sampled.tolist() == [[300], [650], [300]]


@pytest.mark.parametrize("asked", [{"max_num_logprobs": 2}, {"bad_words_token_ids": {0: [[300]]}}])
def test_requests_with_more_options_get_them(asked: dict[str, Any]) -> None:
    ours = NPUSampler().forward(logits(), metadata(**asked))
    theirs = Sampler().forward(logits(), metadata(**asked))
    assert ours.sampled_token_ids.tolist() == theirs.sampled_token_ids.tolist()
    assert (ours.logprobs_tensors is None) == (theirs.logprobs_tensors is None)
