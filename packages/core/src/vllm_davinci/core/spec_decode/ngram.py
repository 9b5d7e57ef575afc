"""Drafts from the text itself: the tokens after an earlier occurrence of the newest ones."""

from typing import Any

import numpy as np
from vllm.config import VllmConfig


class NgramProposer:
    """vLLM's class of this name in numpy: vLLM's needs numba, which it does not require."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.speculative_config
        assert config is not None
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        self._shortest: int = config.prompt_lookup_min
        self._longest: int = config.prompt_lookup_max
        self._num_drafts: int = config.num_speculative_tokens
        self._max_model_len: int = vllm_config.model_config.max_model_len

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of each request; none for requests that sampled nothing.

        num_tokens_no_spec: [num_requests or more], tokens of each request
        token_ids_cpu:      [num_requests or more, max_model_len], the tokens
        """
        return [
            self._drafts(token_ids_cpu[row, : num_tokens_no_spec[row]]) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _drafts(self, tokens: np.ndarray) -> list[int]:
        count = min(self._num_drafts, self._max_model_len - len(tokens))
        end = find_ngram(tokens, self._shortest, self._longest)
        if count <= 0 or end is None:
            return []
        drafts: list[int] = tokens[end : end + count].tolist()
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is no model."""


def find_ngram(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    """The end of the earliest occurrence of the longest repeated n-gram at the end of `tokens`.

    tokens: [num_tokens]; shortest, longest: lengths of an n-gram
    """
    if len(tokens) < 2:
        return None
    lasts = np.flatnonzero(tokens[:-1] == tokens[-1])  # position of the n-gram's last token
    found, length = None, 1
    while lasts.size:
        if length >= shortest:
            found = int(lasts[0]) + 1
        if length == longest:
            break
        lasts = lasts[lasts >= length]
        lasts = lasts[tokens[lasts - length] == tokens[-1 - length]] if lasts.size else lasts
        length += 1
    return found
