"""Marks configurations that are only inspected, so that device checks are skipped."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_described: ContextVar[bool] = ContextVar("is_described", default=False)


@contextmanager
def described_only() -> Iterator[None]:
    """Inside, a configuration may need more devices than this host has: no engine starts."""
    token = _is_described.set(True)
    try:
        yield
    finally:
        _is_described.reset(token)


def is_described() -> bool:
    """True if the configuration being made is only inspected."""
    return _is_described.get()
