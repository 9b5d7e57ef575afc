"""A pytest plugin: processes that tests start are forked from one that has imported torch_npu.

Tests of collectives start their ranks anew for each shape, and ask for "spawn": a fresh
interpreter, whose imports take nearly all of the test's time. Here each is a child of a fork
server, which has done them and has touched no device. Its environment is that of the process which
starts it. An exit code of 255 is multiprocessing's word for a child whose server has ended, as for
want of memory: the kernel ends these processes first (`outcome_plugin.py`).
"""

from __future__ import annotations

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
