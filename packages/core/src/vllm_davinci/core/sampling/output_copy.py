"""Device memory of a step's output, held until the host has its copy."""

from typing import Any, NamedTuple

import torch
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from vllm_davinci.core.inputs.copied_event import CopiedEvent


class EarlyTokens(NamedTuple):
    """A step's tokens, whose copy to the host does not wait for the drafter after them.

    tokens: [num_requests, 1 + drafts] on the host, once `copied` is reached
    """

    tokens: torch.Tensor
    copied: CopiedEvent


class OutputCopy:
    """Keeps the newest asynchronous output until the next step.

    A rank whose output nobody asks for drops it at once, and with it device memory that the copy to
    the host still reads.
    """

    def __init__(self) -> None:
        self._kept: tuple[AsyncGPUModelRunnerOutput, torch.Tensor, Any] | None = None

    def keep(self, output: Any, early: EarlyTokens | None = None) -> Any:
        """Lets the current stream wait for the copy of the step before. Returns the output.

        early: what the output is answered from, in place of vLLM's copy, which comes after the
               step's drafts. Logprobs are copied by vLLM alone.
        """
        if self._kept is not None:
            # Not Stream.wait_event: torch's own stream takes no torch_npu event.
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
