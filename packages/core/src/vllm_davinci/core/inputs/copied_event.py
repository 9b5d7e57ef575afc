"""The event after which the host may write the next step's inputs."""

import torch_npu


class CopiedEvent(torch_npu.npu.Event):
    """An event that is waited for only while it is not reached.

    vLLM waits for it at the begin of every step, though the copies of the step before are nearly
    always done by then; a wait for nothing costs a call of the runtime all the same.
    """

    def synchronize(self) -> None:
        if not self.query():
            super().synchronize()
