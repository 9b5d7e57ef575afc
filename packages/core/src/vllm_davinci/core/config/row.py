"""One row of the table of options: a key, and what becomes of it when it is given."""

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
    """The key stands for an option.

    value:     what a variable that is 1 sets that option to
    only_with: an option without which the key has no effect
    """

    key: str
    value: Any = None
    only_with: str = ""

    def told(self) -> str:
        return f"means {self.key}" + ("" if self.value is None else f" = {shown(self.value)}")


@dataclass(frozen=True)
class NoEffect:
    """The key is accepted and does nothing, which is told."""

    because: str

    def told(self) -> str:
        return f"has no effect: {self.because}"


@dataclass(frozen=True)
class Refused:
    """The key ends the start, unless its value is its default."""

    because: str
    instead: str = "Remove the key"

    def told(self) -> str:
        return f"is refused: {self.because}. {self.instead}"


Fate = Works | Means | NoEffect | Refused


@dataclass(frozen=True)
class Needs:
    """A value other than the default is an error where another option is not `value`.

    otherwise: the end of that error, which begins with the key
    """

    key: str
    otherwise: str
    value: Any = True


@dataclass(frozen=True)
class Row:
    """A key of `additional_config`, or an environment variable.

    key:     dotted
    type:    as Python annotates it
    default: the value that asks for nothing; `...` where there is none
    meaning: what the key asks for, a sentence
    """

    key: str
    type: Any
    default: Any
    meaning: str
    fate: Fate = Works()
    needs: tuple[Needs, ...] = ()

    def refusal(self, value: Any) -> str | None:
        """The error that a value of this key deserves by itself, or None."""
        is_default = type(value) is type(self.default) and value == self.default
        if not isinstance(self.fate, Refused) or is_default:
            return None
        return (
            f"not available in {RELEASE}: additional_config key {self.key!r} = {shown(value)} "
            f"{self.fate.told()}."
        )
