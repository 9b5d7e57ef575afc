"""One configuration value: its source and reason."""

import json
from enum import Enum, StrEnum
from typing import Any, NamedTuple


class Source(StrEnum):
    """The party that decided a value."""

    FLAG = "flag"
    VARIABLE = "variable"
    ADDITIONAL_CONFIG = "additional_config"
    MODEL = "model"
    CHIP = "chip"
    RELEASE = "release"
    DEFAULT = "default"


class Setting(NamedTuple):
    """A value that was given or decided. The last setting of a key counts.

    key:    dotted for options of `additional_config`, else vLLM's name or a variable's name
    reason: a clause, or the user's words; may be empty
    """

    key: str
    value: Any
    source: Source
    reason: str = ""

    def told(self) -> str:
        """The setting as shown in the log."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.key} = {shown(self.value)}{reason}"


def last_by_key(settings: list[Setting]) -> dict[str, Setting]:
    """Key -> its last setting."""
    return {setting.key: setting for setting in settings}


def shown(value: Any) -> str:
    """The value as shown in messages: `true`, 128, 'token'; an enumeration member by its name."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return repr(value)
    return json.dumps(value, default=str)
