"""Processes forked from one that has imported everything already.

What a small program on the virtual NPU, a rank or an engine needs most of the time for is imports.
A fork server has them done, and its children still have a device, an environment and an end of
their own: the server itself never touches a device, whose settings are read at its first use.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context

# Executed once in the server, by its import; the server's children find the modules there.
PRELOADED = "vllm_davinci_testing.processes.preloaded"


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Makes processes as children of the fork server, of which each pytest process has one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context
