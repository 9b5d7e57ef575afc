"""Where the value of an option comes from, and why it is what it is."""

from enum import Enum, StrEnum
from typing import Any, NamedTuple


class Source(StrEnum):
    """Who decided."""

    FLAG = "flag"
    VARIABLE = "variable"
    ADDITIONAL_CONFIG = "additional_config"
    MODEL = "model"
    CHIP = "chip"
    RELEASE = "release"
    DEFAULT = "default"


class Origin(NamedTuple):
    """reason: a clause, or the words of the user; may be empty"""

    source: Source
    reason: str = ""


class Change(NamedTuple):
    """A value of vLLM's configuration that is another one on an NPU."""

    name: str
    before: Any
    after: Any
    reason: str

    def told(self) -> str:
        """For the log."""
        return f"{self.name}: {_word(self.before)} -> {_word(self.after)} ({self.reason})"


class Requests(NamedTuple):
    """Requests of flags and variables, after they have become options.

    notes:   for the user
    origins: of the options, by dotted key
    """

    notes: list[str]
    origins: dict[str, Origin]


NO_REQUESTS = Requests([], {})


def _word(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)
