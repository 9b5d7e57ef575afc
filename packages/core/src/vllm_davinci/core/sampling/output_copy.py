"""Holds the device memory of a step's output until the host has its copy."""

from typing import Any, NamedTuple

import torch
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from vllm_davinci.core.inputs.copied_event import CopiedEvent


class EarlyTokens(NamedTuple):
    """A step's tokens, copied to the host without waiting for the drafter that follows.

    tokens: [num_requests, 1 + drafts] on the host, valid after `copied`
    """

    tokens: torch.Tensor
    copied: CopiedEvent


class OutputCopy:
    """Holds the newest asynchronous output until the next step.

    A rank whose output is not requested would drop it at once, and with it device memory that the
    copy to the host still reads.
    """

    def __init__(self) -> None:
        self._kept: tuple[AsyncGPUModelRunnerOutput, torch.Tensor, Any] | None = None

    def keep(self, output: Any, early: EarlyTokens | None = None) -> Any:
        """Makes the current stream wait for the previous step's copy. Returns the output.

        early: source of the output's tokens instead of vLLM's copy, which follows the step's
               drafts. Only vLLM copies logprobs.
        """
        if self._kept is not None:
            # Not Stream.wait_event: torch's own stream accepts no torch_npu event.
            self._kept[2].wait()
        self._kept = None
        if not isinstance(output, AsyncGPUModelRunnerOutput):
            return output
        self._kept = output, output._sampled_token_ids, output.async_copy_ready_event
        copied_by_vllm = output._logprobs_tensors_cpu, output._num_nans_cpu, output._has_fault
        if early is not None and all(each is None for each in copied_by_vllm):
            output.sampled_token_ids_cpu = early.tokens
            output.async_copy_ready_event = early.copied
        return output
