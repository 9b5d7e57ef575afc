"""Loggers that print: vLLM configures the logger `vllm` and those below it, and no others."""

from typing import Any

from vllm.logger import init_logger as _init_vllm_logger  # noqa: TID251  the one place


def init_logger(name: str) -> Any:
    """A logger with vLLM's level, format and `*_once` methods.

    name: the module's `__name__`
    """
    return _init_vllm_logger(f"vllm.{name}")
