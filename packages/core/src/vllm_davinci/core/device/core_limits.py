"""Gives memory-bound operators fewer vector cores during another ubatch's collective.

A collective passes each byte through memory several times. A memory-bound operator at the same time
slows both down, which lengthens the step if communication takes longer than computation. On few
cores the operator uses less bandwidth, and the collective keeps its speed.
"""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch_npu

from vllm_davinci.core.errors import ConfigurationError, DeviceError

_NO_LIMIT = nullcontext()
_limited: AbstractContextManager[None] = _NO_LIMIT


def memory_bound() -> AbstractContextManager[None]:
    """Applies the step's core limit to memory-bound operators on the current stream.

    Nothing inside may switch to another ubatch.
    """
    return _limited


@contextmanager
def limit_memory_bound(vector_cores: int | None) -> Iterator[None]:
    """Sets the core limit of `memory_bound` inside; None allows all cores."""
    global _limited
    if vector_cores is None:
        yield
        return
    _limited = _Limit(vector_cores)
    try:
        yield
    finally:
        _limited = _NO_LIMIT


def check_vector_cores(option: str, vector_cores: int | None) -> None:
    """Raises ConfigurationError if the current device has fewer."""
    if vector_cores is None:
        return
    available = torch_npu.npu.get_device_limit(torch_npu.npu.current_device())["vector_core_num"]
    if vector_cores > available:
        raise ConfigurationError(
            f"{option} = {vector_cores} exceeds the {available} vector cores of this device. Set "
            f"it to at most {available}, or remove the option to use all."
        )


class _Limit(AbstractContextManager[None]):
    """Limits the cores of the current stream. torch_npu empties its task queue before a change.

    torch_npu reports a thread's limits to CANN when the thread switches streams, but not when it
    returns from a collective, which has reported its own: so this class reports them again.
    """

    def __init__(self, vector_cores: int) -> None:
        self._vector_cores = vector_cores
        self._use = ctypes.CDLL("libascendcl.so").aclrtUseStreamResInCurrentThread
        self._use.argtypes = [ctypes.c_void_p]

    def __enter__(self) -> None:
        stream = torch_npu.npu.current_stream()
        torch_npu.npu.set_stream_limit(stream, vector_num=self._vector_cores)
        if status := self._use(stream.npu_stream):
            raise DeviceError(f"aclrtUseStreamResInCurrentThread returned {status}.")

    def __exit__(self, *_: object) -> None:
        torch_npu.npu.reset_stream_limit(torch_npu.npu.current_stream())
