"""Fewer vector cores for operators that wait for memory, beside another ubatch's collective.

A collective passes each byte through memory several times. Beside an operator that moves as much
as memory does, both slow down; and where communication takes longer than computing, that is time of
the step. On few cores such an operator moves less, and the collective keeps its pace.
"""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch_npu

from vllm_davinci.core.errors import ConfigurationError, DeviceError

_NO_LIMIT = nullcontext()
_limited: AbstractContextManager[None] = _NO_LIMIT


def memory_bound() -> AbstractContextManager[None]:
    """For operators on the current stream that wait for memory: within, they have a step's limit.

    Nothing that runs within may hand over to another ubatch.
    """
    return _limited


@contextmanager
def limit_memory_bound(vector_cores: int | None) -> Iterator[None]:
    """Within, `memory_bound` stands for so many vector cores; None leaves all."""
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
    """Raises ConfigurationError where the current device has fewer."""
    if vector_cores is None:
        return
    available = torch_npu.npu.get_device_limit(torch_npu.npu.current_device())["vector_core_num"]
    if vector_cores > available:
        raise ConfigurationError(
            f"{option} = {vector_cores}, but operators may take {available} vector cores here. "
            "Choose at most those, or leave the option out for all."
        )


class _Limit(AbstractContextManager[None]):
    """Limits the cores of the current stream. torch_npu empties its task queue before a change.

    torch_npu tells CANN whose limits hold in a thread when the thread turns to another stream, but
    not when it comes back from a collective, which has told CANN of its own: so this tells, too.
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
