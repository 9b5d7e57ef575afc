"""Graphs of a drafter's passes, in addition to those of the target's steps."""

from collections import Counter

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.graph.wrapper import NPUGraphWrapper
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.spec_decode.draft_passes import DrafterToCapture, DraftPass, DraftPasses

logger = init_logger(__name__)


class CapturedDrafter:
    """The graphs of one drafter: one per number of requests and kind of pass."""

    def __init__(self, asked: DrafterToCapture, vllm_config: VllmConfig) -> None:
        drafter = asked.drafter
        forward = drafter.model.forward
        num_drafts = vllm_config.num_speculative_tokens
        self._drafter = drafter
        self._wrappers = {
            is_first: NPUGraphWrapper(forward, vllm_config)
            for is_first in ((True, False) if num_drafts > 1 else (True,))
        }
        drafter.passes = self._passes = DraftPasses(
            drafter.model, asked.query_len, self._wrappers, asked.block_table, asked.lengths
        )

    @property
    def graphs_per_size(self) -> int:
        """Kinds of passes: the first of a step, and later ones with two or more drafts."""
        return len(self._wrappers)

    def capture(self, sizes: list[int]) -> dict[int, str]:
        """Captures the passes of these numbers of requests; a size that fails is eager.

        Returns tokens of the first pass -> why it could not be captured.
        """
        captured: list[int] = []
        failed: dict[int, str] = {}
        for count in sizes:
            passes = self._passes.of_size(count)
            failure = next(filter(None, map(self._capture_pass, passes)), None)
            if failure is None:
                captured.append(count)
            else:
                failed[passes[0].num_tokens] = f"of the drafter, {failure}"
        self._passes.use_sizes(captured)
        for wrapper in self._wrappers.values():
            wrapper.replays.clear()  # replays so far were no steps
        return failed

    def _capture_pass(self, planned: DraftPass) -> str | None:
        """The reason why some rank could not run, capture or replay the pass; None if all could."""
        failure: str | None = None
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.FULL):
            try:
                self._drafter.run_dummy_pass(planned, mode)
                torch.accelerator.synchronize()
            except RuntimeError as error:
                failure = f"{type(error).__name__}: {error}"
                logger.exception("The drafter's graph %s was not captured.", planned)
            if not least_of_all_ranks(failure is None):
                return failure or "another rank could not; see its log"
        if not self._wrappers[planned.is_first].replays[planned.num_tokens]:
            return "its forward never reached a graph"
        return None

    def replays(self) -> dict[int, int]:
        """Tokens of a graph -> passes that replayed it."""
        return dict(sum((wrapper.replays for wrapper in self._wrappers.values()), Counter()))

    def clear(self) -> None:
        """Drops the graphs; none of them may be running."""
        for wrapper in self._wrappers.values():
            wrapper.clear_graphs()
