"""vLLM's sampler, with the newest tokens of penalties and bad words read from the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler

from vllm_davinci.core.sampling.newest_tokens import PLACEHOLDER, NewestTokens

NO_TOKEN = -1


class _TopKTopP(TopKTopPSampler):
    """Limits by torch operators, also if vLLM considers Triton usable."""

    def forward_native(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """vLLM's method. logits: [num_requests, vocabulary], in place; k, p: [num_requests]"""
        if k is not None or p is not None:
            logits = apply_top_k_top_p_pytorch(logits, k, p)
        sampled: tuple[torch.Tensor, torch.Tensor | None]
        sampled = super().forward_native(logits, generators, None, None)
        return sampled


class NPUSampler(Sampler):
    """Samples the same as vLLM's, without waiting for tokens that only the device knows.

    newest: sampled by the previous step; None if the host knows all tokens
    """

    newest: NewestTokens | None = None

    def __init__(self, logprobs_mode: Any = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.topk_topp_sampler = _TopKTopP(logprobs_mode, use_fp64_gumbel)

    @contextmanager
    def knowing(self, newest: NewestTokens) -> Iterator[None]:
        """Inside, samples after a step whose tokens only the device knows."""
        self.newest = newest
        try:
            yield
        finally:
            self.newest = None

    def forward(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        """vLLM's forward. Takes the index of an unchanged greatest logit without a float32 copy.

        logits: [num_requests, vocabulary], any float dtype: all convert to float32 exactly
        """
        if not _takes_greatest(sampling_metadata):
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        sampled = self.greedy_sample(logits).to(torch.int32)
        return SamplerOutput(sampled_token_ids=sampled.unsqueeze(-1), logprobs_tensors=None)

    def apply_logits_processors(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool,
    ) -> torch.Tensor:
        if self.newest is not None and sampling_metadata.bad_words_token_ids:
            _exclude(
                logits,
                list(
                    bad_word_ends(
                        sampling_metadata.bad_words_token_ids, sampling_metadata.output_token_ids
                    )
                ),
                self.newest.tokens,
            )
            sampling_metadata = replace(sampling_metadata, bad_words_token_ids={})
        processed: torch.Tensor = super().apply_logits_processors(
            logits, sampling_metadata, predict_bonus_token
        )
        return processed

    def apply_penalties(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        output_token_ids: list[list[int]],
    ) -> torch.Tensor:
        if self.newest is None or sampling_metadata.no_penalties:
            penalized: torch.Tensor = super().apply_penalties(
                logits, sampling_metadata, output_token_ids
            )
            return penalized
        assert sampling_metadata.prompt_token_ids is not None
        penalized = apply_penalties(
            logits,
            sampling_metadata.prompt_token_ids,
            _outputs_on_device(output_token_ids, self.newest, logits),
            sampling_metadata.presence_penalties,
            sampling_metadata.frequency_penalties,
            sampling_metadata.repetition_penalties,
        )
        return penalized


def _takes_greatest(metadata: SamplingMetadata) -> bool:
    """True if every request's token is its greatest logit, and nothing else is requested."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and (holder is None or not holder.has_tracked_requests())
        and all(map(_changes_nothing, metadata.logitsprocs.non_argmax_invariant))
    )


def _changes_nothing(processor: object) -> bool:
    """True if no request of the batch uses a logits processor."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return False


class BadWordEnd(NamedTuple):
    """A token that must not follow `after`, the newest token; NO_TOKEN: any."""

    row: int
    token: int
    after: int


def bad_word_ends(
    bad_words: dict[int, list[list[int]]], outputs: Sequence[Sequence[int]]
) -> Iterator[BadWordEnd]:
    """Last tokens of bad words whose other tokens end a request's output.

    bad_words: row -> words, each a list of tokens
    outputs:   of each row; a placeholder at the end stands for the newest token
    """
    for row, words in bad_words.items():
        output = outputs[row]
        for *start, last in words:
            if len(start) > len(output):
                continue
            end = list(output[len(output) - len(start) :])
            if end == start:
                yield BadWordEnd(row, last, NO_TOKEN)
            elif end and end[-1] == PLACEHOLDER and end[:-1] == start[:-1]:
                yield BadWordEnd(row, last, start[-1])


def _exclude(logits: torch.Tensor, ends: list[BadWordEnd], newest: torch.Tensor) -> None:
    """Excludes these tokens, in place.

    logits: [num_requests, vocabulary]; newest: [num_requests]
    """
    if not ends:
        return
    columns = _to_device(np.array(ends, dtype=np.int64).T.copy(), logits.device)
    rows, tokens, after = columns[0], columns[1], columns[2]
    follows = (after == NO_TOKEN) | (newest.index_select(0, rows) == after)
    change = torch.where(follows, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((rows, tokens), change, accumulate=True)


def _outputs_on_device(
    outputs: Sequence[Sequence[int]], newest: NewestTokens, logits: torch.Tensor
) -> torch.Tensor:
    """[num_requests, longest output + 1]: tokens of each output; elsewhere the vocabulary's size.

    The last column absorbs the writes of rows without a newest token.
    """
    vocabulary = logits.shape[1]
    width = max(map(len, outputs)) + 1
    padded = np.full((len(outputs), width + 1), vocabulary, dtype=np.int64)
    for row, output in enumerate(outputs):
        padded[row, : len(output)] = output
        # The last column receives each row's newest token.
        padded[row, width] = len(output) - 1 if newest.known[row] else width - 1
    padded[:, :width][padded[:, :width] == PLACEHOLDER] = vocabulary
    on_device = _to_device(padded, logits.device)
    tokens, places = on_device[:, :width], on_device[:, width:]
    known = places < width - 1
    value = torch.where(known, newest.tokens.to(torch.int64).unsqueeze(1), vocabulary)
    return tokens.scatter(1, places, value)


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
