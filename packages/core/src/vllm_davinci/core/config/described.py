"""Configurations that are only described: no engine starts with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_described: ContextVar[bool] = ContextVar("is_described", default=False)


@contextmanager
def described_only() -> Iterator[None]:
    """Configurations made inside may need more devices than this host has: none of them starts."""
    token = _is_described.set(True)
    try:
        yield
    finally:
        _is_described.reset(token)


def is_described() -> bool:
    """Tells whether the configuration that is being made is only described."""
    return _is_described.get()
