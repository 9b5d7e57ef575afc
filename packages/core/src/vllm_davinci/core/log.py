"""Loggers that print, and lines of vLLM's that mean nothing on this platform."""

import logging
from typing import Any

from vllm.logger import init_logger as _init_vllm_logger  # noqa: TID251  the one place

# Logger -> beginnings of warnings, as they stand in vLLM's source. Each would come from every
# process of an engine, about a choice that this platform makes and no user can.
WITHOUT_MEANING_HERE: dict[str, tuple[str, ...]] = {
    "vllm.config.vllm": (
        # Nothing is compiled, whatever the settings.
        "Inductor compilation was disabled by user settings",
        # The V1 runner is the one that is served (core.model_runner); V2 is refused.
        "Model Runner V2 requires Triton",
    ),
    # Of our own scheduler (core.scheduler), which is asynchronous where vLLM's is.
    "vllm.config.scheduler": ("Using custom scheduler class %s",),
}


def init_logger(name: str) -> Any:
    """A logger with vLLM's level, format and `*_once` methods.

    vLLM configures the logger `vllm` and those below it, and no others.

    name: the module's `__name__`
    """
    return _init_vllm_logger(f"vllm.{name}")


def leave_out_what_means_nothing() -> None:
    """Keeps those warnings out of this process's log. Idempotent."""
    for name in WITHOUT_MEANING_HERE:
        logging.getLogger(name).addFilter(_means_something)


def _means_something(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(WITHOUT_MEANING_HERE[record.name]):
        return True
    is_of_users = isinstance(record.args, tuple) and "vllm_davinci" not in str(record.args[:1])
    return is_of_users and bool(record.args)
