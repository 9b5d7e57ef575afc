"""Defines the commands of `vllm-davinci`, and finds those of other packages by entry points."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

GROUP = "vllm_davinci.commands"

# Commands of packages that may not be installed -> the package's extra of this one.
EXTRAS = {"deployments": "planner", "dry-run": "planner", "pools": "planner", "verify": "verify"}


class EngineOptions(Enum):
    """Place of `vllm serve`'s options on a command's line."""

    NONE = "it takes none"
    AFTER_DASHES = "what follows `--`"
    UNKNOWN = "every option that the command does not have itself"


@dataclass(frozen=True)
class Command:
    """A command.

    question: answered by the command, for `--help`
    module:   defines `add_arguments(parser)` and `run(options)`, which returns the exit status;
              `run(options, engine_arguments)` if the command takes options of an engine
    """

    question: str
    module: ModuleType
    engine_options: EngineOptions = EngineOptions.NONE

    def run(self, options: Any, engine_arguments: list[str]) -> int:
        run: Callable[..., int] = self.module.run
        if self.engine_options is EngineOptions.NONE:
            return run(options)
        return run(options, engine_arguments)


def installed_commands() -> dict[str, Command]:
    """Commands of the planner and of other packages that are installed, by name."""
    return {point.name: point.load() for point in sorted(entry_points(group=GROUP))}


def missing_command(name: str) -> str | None:
    """Says how to install a command's missing package; None if there is no such command."""
    extra = EXTRAS.get(name)
    if extra is None:
        return None
    return (
        f"vllm-davinci {name} is in vllm-davinci-{extra}, which is not installed: "
        f"pip install 'vllm-davinci[{extra}]'"
    )
