"""vLLM's scheduler for models whose images see each other both ways: no image is cut.

vLLM itself ends a chunk of a prompt before an image that does not fit (disable_chunked_mm_input),
but cuts one at which the chunk begins. Such a request waits for a step with room here.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request

EncoderInputs = tuple[list[int], int, int, list[int], list[int]]


class WholeImageScheduler(Scheduler):
    """Keeps every image in one step."""

    def _try_schedule_encoder_inputs(
        self,
        request: "Request",
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> EncoderInputs:
        """vLLM's, or no tokens where the first ones are of an image that ends in a later step."""
        end = num_computed_tokens + num_new_tokens
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset == num_computed_tokens and end < place.offset + place.length:
                return [], 0, encoder_compute_budget, [], []
        scheduled: EncoderInputs = super()._try_schedule_encoder_inputs(
            request,
            num_computed_tokens,
            num_new_tokens,
            encoder_compute_budget,
            shift_computed_tokens,
        )
        return scheduled


class AsyncWholeImageScheduler(WholeImageScheduler, AsyncScheduler):
    """The same beside steps that still run."""
