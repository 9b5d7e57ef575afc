"""Events of copies; the host waits for them only if necessary."""

from threading import Lock

import torch_npu


class CopiedEvent(torch_npu.npu.Event):
    """An event whose wait returns without a runtime call if the event is known to be reached.

    vLLM waits at the beginning of every step for the copies of the previous step, which are nearly
    always done by then; the wait would still cost a runtime call. A second thread that waits for
    the same copy finds it reached by the first thread's wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_waited_for = Lock()

    def synchronize(self) -> None:
        with self._is_waited_for:
            if not self.query():
                super().synchronize()
