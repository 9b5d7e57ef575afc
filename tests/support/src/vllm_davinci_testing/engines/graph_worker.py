"""A worker that reports what its graphs hold, and can exhaust its device."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from vllm_davinci.vnpu import _C

# Patterns of errors on an exhausted device.
SPARE_STREAMS = 4
SPARE_BYTES = 1 << 20
FOR_WAITS = 1  # ACL_EVENT_SYNC, in acl_rt.h


class GraphWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any
    rank: int

    def planned_and_held(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the planned and the real resources of all graphs. Memory in bytes."""
        runner = self.model_runner
        held = {**_C.graph_holdings(), "memory": runner.graphs.captured_bytes}
        return runner.graphs.plan.totals(), held

    def capture_again_with_a_failure(self, sizes: list[int], num_tokens: int, rank: int) -> None:
        """Captures all sizes again, with an error of one rank's model during one capture."""

        def fail(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
            is_captured = torch.npu.is_current_stream_capturing()
            if is_captured and kwargs["positions"].shape[0] == num_tokens:
                raise RuntimeError(f"planted in the capture of {num_tokens} tokens")

        hook = None
        if rank == self.rank:
            hook = self.model_runner.get_model().register_forward_pre_hook(fail, with_kwargs=True)
        self._capture_again(sizes)
        if hook is not None:
            hook.remove()

    def capture_again_without(self, sizes: list[int], what: str) -> None:
        """Captures all sizes again on a device that has almost used up `what`.

        what: streams, events or memory
        """
        held = _C.graph_holdings()
        taken = {
            "streams": _taken_streams(SPARE_STREAMS),
            # Streams for two graphs, and some for the eager step before each capture.
            "events": _taken_events(5 * held["events"] // (2 * held["graphs"])),
            "memory": _taken_memory(SPARE_BYTES),
        }[what]
        self.model_runner.graphs.destroy()
        torch.npu.synchronize()
        torch.npu.empty_cache()
        with taken:
            self._capture_again(sizes)

    def _capture_again(self, sizes: list[int]) -> None:
        runner = self.model_runner
        runner.graphs.destroy()
        eager = runner.cudagraph_manager.dispatch(1, 1, 1, 0).cg_mode
        assert eager is CUDAGraphMode.NONE, "a step would replay a graph that was dropped"
        runner.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        runner.graphs.use_sizes(sizes)
        runner.capture_model()


@contextmanager
def _taken_memory(spare_bytes: int) -> Iterator[None]:
    free_bytes, _ = torch.npu.mem_get_info()
    acl, taken = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
    # Not from torch's allocator, which is limited to a share of the device.
    assert not acl.aclrtMalloc(ctypes.byref(taken), ctypes.c_size_t(free_bytes - spare_bytes), 0)
    yield
    acl.aclrtFree(taken)


@contextmanager
def _taken(
    create: Callable[[Any], int], destroy: Callable[[Any], int], spare: int
) -> Iterator[None]:
    """Allocates all of the device's handles except `spare`."""
    handles = []
    while not create(ctypes.byref(handle := ctypes.c_void_p())):
        handles.append(handle)
    for _ in range(spare):
        destroy(handles.pop())
    yield
    for handle in handles:
        destroy(handle)


def _taken_streams(spare: int) -> AbstractContextManager[None]:
    acl = ctypes.CDLL("libascendcl.so")
    return _taken(acl.aclrtCreateStream, acl.aclrtDestroyStream, spare)


def _taken_events(spare: int) -> AbstractContextManager[None]:
    acl = ctypes.CDLL("libascendcl.so")
    # The device creates this kind of events immediately.
    return _taken(
        lambda event: acl.aclrtCreateEventWithFlag(event, FOR_WAITS), acl.aclrtDestroyEvent, spare
    )
