"""Detects a drafter whose drafts are never accepted."""

from typing import Any

from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

DRAFTS = 1000


class AcceptanceWatch:
    """Warns once if none of the first drafts of an engine has been accepted.

    The text is then right, but each step takes longer. vLLM reports the acceptance rate only among
    other statistics.
    """

    def __init__(self) -> None:
        self._drafts = self._accepted = 0

    def record(self, stats: Any) -> None:
        """Adds a step's counts. stats: vLLM's SpecDecodingStats, or None"""
        if stats is None or self._accepted or self._drafts >= DRAFTS:
            return
        self._drafts += stats.num_drafts
        self._accepted += stats.num_accepted_tokens
        if self._drafts >= DRAFTS and not self._accepted:
            logger.warning(
                "Speculative decoding: none of %d drafts was accepted. The text is right, but "
                "drafting only costs time. Usual causes: the drafter was made for another model "
                "or another quantization of it, its weights are not trained, or the text has no "
                "repetitions for ngram. Check --speculative-config, or start without it.",
                self._drafts,
            )
