"""A worker of which one rank fails at a chosen place of its start."""

from __future__ import annotations

import os
from typing import Any

from vllm_davinci.core.worker import NPUWorker

# The method of the runner before which it fails, of rank 1.
FAILS_BEFORE = "TEST_FAILS_BEFORE"


class FailingStart(NPUWorker):
    """Named by vLLM's option worker_cls."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        method = os.environ[FAILS_BEFORE]

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"planted in {method}")

        if self.rank == 1:
            setattr(self.model_runner, method, fail)
