"""Events of copies, for which the host waits only where it must."""

from threading import Lock

import torch_npu


class CopiedEvent(torch_npu.npu.Event):
    """An event that is waited for only while it is not reached, and by one thread.

    vLLM waits at the begin of every step for the copies of the step before, which are nearly always
    done by then; a wait for nothing costs a call of the runtime all the same. A second thread that
    waits for the same copy finds it reached by the wait of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_waited_for = Lock()

    def synchronize(self) -> None:
        with self._is_waited_for:
            if not self.query():
                super().synchronize()
