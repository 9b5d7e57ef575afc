"""Whether Python runs inside a torch operator that is implemented in Python.

A greenlet must not be left there: a C++ frame of the operator is on its stack, and pybind11 would
end the process. So every hand-over asks. Walking the stack answers, at more than all else that a
hand-over costs. Without a walk: torch gives up Python's lock before it calls an operator and takes
it again around one that is implemented in Python, and the interpreter counts, for each thread, how
often it was taken (`gilstate_counter` of PyThreadState, in CPython's Include/cpython/pystate.h).
"""

import ctypes
import functools
import sys
from types import FrameType
from typing import Any, Protocol

import torch
import torch._ops
from torch.library import Library

# Read of a thread's state, which is larger in every Python that is supported: 64 numbers.
_NUMBERS = 64
_OPERATORS = "vllm_davinci_multistream"
# Operators implemented in Python are called by functions of this module.
_OPERATOR_MODULE = torch._ops.__dict__

_api = ctypes.PyDLL(None)  # as ctypes.pythonapi, whose functions are everybody's to declare
_api.PyThreadState_Get.restype = ctypes.c_void_p
_api.PyGILState_Release.restype = None


class Depth(Protocol):
    """A number that is larger inside of operators than outside of them, of one thread."""

    @property
    def value(self) -> int:
        """Now."""


def depth_of_thread() -> Depth:
    """Depth of the current thread. Only this thread may read it."""
    offset = _offset_of_count()
    return WalkedDepth() if offset is None else _count_at(offset)


class WalkedDepth:
    """Where the interpreter's count does not tell: found by a walk, from whoever asks outwards."""

    @property
    def value(self) -> int:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_globals is _OPERATOR_MODULE:
                return 1
            frame = frame.f_back
        return 0


@functools.cache
def _offset_of_count() -> int | None:
    """Bytes to the count in a thread's state. None where an operator does not change it."""
    offset = _changed_by_taking_the_lock()
    return offset if offset is not None and _shows_operators(_count_at(offset)) else None


def _changed_by_taking_the_lock() -> int | None:
    """Where the only number is that taking the lock raises by one, each of three times."""
    taken: list[int] = []
    states = [_numbers()]
    try:
        for _ in range(3):
            taken.append(_api.PyGILState_Ensure())
            states.append(_numbers())
    finally:
        for each in reversed(taken):
            _api.PyGILState_Release(each)
    states.append(_numbers())
    places = [
        place
        for place, (before, *within, after) in enumerate(zip(*states, strict=True))
        if within == [before + 1, before + 2, before + 3] and after == before
    ]
    return places[0] * ctypes.sizeof(ctypes.c_int) if len(places) == 1 else None


def _shows_operators(depth: Depth) -> bool:
    """Whether it is larger inside an operator, and inside one that another one calls."""
    library = Library(_OPERATORS, "FRAGMENT")  # its operators end with it
    seen: list[int] = []

    operators: Any = getattr(torch.ops, _OPERATORS)

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(depth.value)
        return x.clone()

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(depth.value)
        result: torch.Tensor = operators.inner(x)
        return result

    for each in (inner, outer):
        library.define(f"{each.__name__}(Tensor x) -> Tensor")
        library.impl(each.__name__, each, "CompositeExplicitAutograd")
    before = depth.value
    operators.outer(torch.zeros(1, device="cpu"))
    return before < seen[0] < seen[1] and depth.value == before


def _count_at(offset: int) -> Depth:
    return ctypes.c_int.from_address(_api.PyThreadState_Get() + offset)


def _numbers() -> list[int]:
    return list((ctypes.c_int * _NUMBERS).from_address(_api.PyThreadState_Get()))
