"""Metadata for vLLM's sampler, for greedy requests without options."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata


def greedy_metadata(
    outputs: list[list[int]], device: torch.device, **changes: Any
) -> SamplingMetadata:
    """For a row of logits per request; `changes` replaces fields. outputs: tokens so far, by row"""
    zeros = torch.zeros(len(outputs), device=device)
    fields: dict[str, Any] = {
        "temperature": None,
        "all_greedy": True,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": zeros + 1,
        "output_token_ids": outputs,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(fields | changes))
