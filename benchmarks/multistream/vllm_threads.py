"""Runs ubatches with vLLM's own contexts, each in a thread, on the same virtual device."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from vllm.forward_context import ForwardContext
from vllm.utils import torch_utils
from vllm.v1.worker import ubatching

LIMIT_S = 60


def at_a_dispatch() -> None:
    """Makes vLLM's calls where a ubatch sends rows to experts, without the transfer."""
    ubatching.dbo_yield_and_switch_from_compute_to_comm()
    ubatching.dbo_switch_to_compute_sync()


def at_a_combine() -> None:
    """Makes vLLM's calls where a ubatch receives the results, without the transfer."""
    ubatching.dbo_yield_and_switch_from_compute_to_comm()
    ubatching.dbo_switch_to_compute()
    ubatching.dbo_switch_to_comm()
    ubatching.dbo_yield_and_switch_from_comm_to_compute()


def run_two(turns: Callable[[], None], contexts: list[ForwardContext]) -> None:
    """Runs `turns` in two threads that alternate at each yield."""
    compute, communication = torch.npu.current_stream(), torch.npu.Stream()
    barrier = threading.Barrier(3)
    ubatches = ubatching.make_ubatch_contexts(2, compute, communication, contexts, barrier)

    def body(ubatch: ubatching.UBatchContext) -> None:
        torch.npu.set_device(0)
        with ubatch:
            turns()

    with ThreadPoolExecutor(2) as threads:
        halves = [threads.submit(body, ubatch) for ubatch in ubatches]
        barrier.wait(LIMIT_S)
        ubatches[0].cpu_wait_event.set()
        for half in halves:
            half.result(LIMIT_S)


def set_stream(stream: torch.npu.Stream) -> None:
    """Stores the current stream for vLLM's contexts to compare, like vLLM's wrapper for CUDA."""
    torch_utils._current_stream_tls.value = stream
    torch.npu.set_stream(stream)
