"""Drafters of vLLM's method custom_class: always wrong, never wrong, or right up to a position."""

import json
import os
import random
from typing import Any

import numpy as np
from vllm.config import VllmConfig

# A file with texts, each a list of all tokens: [[3, 5, ...], ...].
TEXTS = "TESTING_TEXTS_TO_DRAFT"
WRONG = f"{__name__}.WrongDrafter"
KNOWING = f"{__name__}.KnowingDrafter"
GUESSING = f"{__name__}.GuessingDrafter"


class WrongDrafter:
    """Drafts random tokens, repeats of the newest token, fewer tokens than allowed, or none."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.speculative_config
        assert config is not None
        self.num_drafts: int = config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._draw = random.Random(1)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        return [
            self.drafts(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def drafts(self, text: list[int]) -> list[int]:
        count = min(self._draw.randint(0, self.num_drafts), self.max_model_len - len(text))
        if self._draw.random() < 0.3:
            return text[-count:] if count else []
        return [self._draw.randrange(self._vocabulary) for _ in range(count)]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads nothing: this drafter has no model."""


class KnowingDrafter(WrongDrafter):
    """Drafts the continuation of the text in TEXTS that begins like the request."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        with open(os.environ[TEXTS], encoding="utf-8") as file:
            self._texts: list[list[int]] = json.load(file)

    def drafts(self, text: list[int]) -> list[int]:
        for known in self._texts:
            if known[: len(text)] == text:
                return known[len(text) : len(text) + self.num_drafts]
        return []


class GuessingDrafter(KnowingDrafter):
    """Always drafts the same number of tokens, and gets the first few (none to all) right."""

    def drafts(self, text: list[int]) -> list[int]:
        right = super().drafts(text)
        place = self._draw.randint(0, self.num_drafts)
        wrong = [(token + 1) % self._vocabulary for token in right[place:]]
        return right[:place] + wrong
