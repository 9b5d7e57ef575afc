"""A worker with one rank that fails at a chosen point of its start."""

import os
from typing import Any

from vllm_davinci.core.worker import NPUWorker

# The runner's method that fails on rank 1.
FAILING_METHOD = "TEST_FAILING_METHOD"


class FailingStart(NPUWorker):
    """Selected by vLLM's option worker_cls."""

    def init_device(self) -> None:
        super().init_device()
        method = os.environ[FAILING_METHOD]

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"planted in {method}")

        if self.rank == 1:
            setattr(self.model_runner, method, fail)
