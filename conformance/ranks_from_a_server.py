"""A pytest plugin that forks tests' processes from a server that has imported torch_npu.

Tests of collectives spawn their ranks again for each shape, and the imports take nearly all of the
    time. Here a fork server with these imports, which has used no device, forks each rank with the
    environment of the process that starts it. Exit code 255 means that the server has ended, for
    example because memory ran out: the kernel ends these processes first (`outcome_plugin.py`).
"""

import multiprocessing
import multiprocessing.context
import os
from typing import Any

PRELOADED = ["torch_npu.testing.testcase", "torch_npu.testing.common_distributed"]


class _Process(multiprocessing.context.ForkServerProcess):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(multiprocessing.context.ForkServerContext):
    _name = "spawn"
    Process = _Process


def pytest_configure() -> None:
    context = _Context()
    context.set_forkserver_preload(PRELOADED)
    multiprocessing.context._concrete_contexts["spawn"] = context
