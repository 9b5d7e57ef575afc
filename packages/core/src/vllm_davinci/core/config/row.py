"""One row of the option table: a key and its effect when given."""

from dataclasses import dataclass
from typing import Any

from vllm_davinci.core.config.setting import shown
from vllm_davinci.core.errors import RELEASE


@dataclass(frozen=True)
class Works:
    """The key does what its meaning says."""

    def told(self) -> str:
        return "works"


@dataclass(frozen=True)
class Means:
    """The key sets another option.

    value:     value of that option if the variable is 1
    only_with: an option without which the key has no effect
    """

    key: str
    value: Any = None
    only_with: str = ""

    def told(self) -> str:
        return f"means {self.key}" + ("" if self.value is None else f" = {shown(self.value)}")


@dataclass(frozen=True)
class NoEffect:
    """The key is accepted and has no effect; the log says so."""

    because: str

    def told(self) -> str:
        return f"has no effect: {self.because}"


@dataclass(frozen=True)
class Refused:
    """The key stops the start unless it has its default value."""

    because: str
    instead: str = "Remove the key"

    def told(self) -> str:
        return f"is refused: {self.because}. {self.instead}"


Fate = Works | Means | NoEffect | Refused


@dataclass(frozen=True)
class Needs:
    """Raises an error for a non-default value if another option is not `value`.

    otherwise: end of the error message, which begins with the key
    """

    key: str
    otherwise: str
    value: Any = True


@dataclass(frozen=True)
class Row:
    """A key of `additional_config`, or an environment variable.

    key:     dotted
    type:    Python annotation
    default: the value that requests nothing; `...` without one
    meaning: what the key requests, a sentence
    """

    key: str
    type: Any
    default: Any
    meaning: str
    fate: Fate = Works()
    needs: tuple[Needs, ...] = ()

    def refusal(self, value: Any) -> str | None:
        """The error message if this value is refused regardless of other keys, or None."""
        is_default = type(value) is type(self.default) and value == self.default
        if not isinstance(self.fate, Refused) or is_default:
            return None
        return (
            f"not available in {RELEASE}: additional_config key {self.key!r} = {shown(value)} "
            f"{self.fate.told()}."
        )
