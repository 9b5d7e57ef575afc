"""Device memory of a step's output, held until the host has its copy."""

from typing import Any

from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput


class OutputCopy:
    """Keeps the newest asynchronous output until the next step.

    A rank whose output nobody asks for drops it at once, and with it device memory that the copy to
    the host still reads.
    """

    def __init__(self) -> None:
        self._kept: AsyncGPUModelRunnerOutput | None = None

    def keep(self, output: Any) -> Any:
        """Lets the current stream wait for the copy of the step before. Returns the output."""
        if self._kept is not None:
            # Not Stream.wait_event: torch's own stream takes no torch_npu event.
            self._kept.async_copy_ready_event.wait()
        self._kept = output if isinstance(output, AsyncGPUModelRunnerOutput) else None
        return output
