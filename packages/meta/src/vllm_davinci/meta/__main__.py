"""`vllm-davinci COMMAND`: report on environment, configuration, checkpoints; generate, compare,
quantize, score; with their packages: dry-run, plan pools, list deployments, verify a device."""

import argparse
import difflib
import sys
from typing import Any

from vllm_davinci.meta import (
    check_model,
    compare,
    doctor,
    explain,
    generate,
    perplexity,
    quantize,
    show_config,
)
from vllm_davinci.meta.commands import Command, EngineOptions, installed_commands, missing_command
from vllm_davinci.meta.given_arguments import unknown_option

AFTER_DASHES = EngineOptions.AFTER_DASHES
COMMANDS = {
    "doctor": Command("can a model run here?", doctor),
    "config": Command(
        "what would an engine run with, who decided it, and why?", show_config, AFTER_DASHES
    ),
    "check-model": Command(
        "how would a checkpoint be loaded, and what is wrong with it?", check_model
    ),
    "generate": Command("text from a local checkpoint or GGUF file", generate, AFTER_DASHES),
    "compare": Command(
        "are its greedy tokens those of transformers on the CPU?", compare, AFTER_DASHES
    ),
    "quantize": Command("write an int8 checkpoint", quantize),
    "explain": Command("why was this step not split into ubatches?", explain, AFTER_DASHES),
    "perplexity": Command(
        "how well does a checkpoint predict text, as it is served?", perplexity, AFTER_DASHES
    ),
}


class _Parser(argparse.ArgumentParser):
    """Parser of one command. Refuses an argument that it does not know with the nearest option.

    takes: place of an engine's options
    """

    takes = EngineOptions.NONE

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        options, unknown = super().parse_known_args(*args, **kwargs)
        if unknown and self.takes is not EngineOptions.UNKNOWN:
            self.error(f"unknown argument {unknown[0]}.{self._hint(unknown[0])}")
        return options, unknown

    def _hint(self, argument: str) -> str:
        option = argument.partition("=")[0]
        if not option.startswith("--"):
            return ""
        if self.takes is EngineOptions.AFTER_DASHES and unknown_option([option]) is None:
            return " Options of vllm serve come after `--`."
        own = [name for action in self._actions for name in action.option_strings]
        nearest = difflib.get_close_matches(option, own, n=1)
        return f" Did you mean {nearest[0]}?" if nearest else ""


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-davinci", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, command in commands.items():
        subparser = subparsers.add_parser(name, help=command.question)
        subparser.takes = command.engine_options
        command.module.add_arguments(subparser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command. The exit status is 0 only if its answer is positive; each command defines
    this.
    """
    commands = COMMANDS | installed_commands()
    parser = _parser(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name not in commands and (message := missing_command(name)) is not None:
        parser.exit(2, f"{message}\n")
    takes = commands[name].engine_options if name in commands else EngineOptions.NONE
    engine_arguments: list[str] = []
    if takes is EngineOptions.AFTER_DASHES and "--" in given:
        at = given.index("--")
        given, engine_arguments = given[:at], given[at + 1 :]
    if takes is EngineOptions.UNKNOWN:
        options, engine_arguments = parser.parse_known_args(given)
    else:
        options = parser.parse_args(given)
    return commands[options.command].run(options, engine_arguments)


if __name__ == "__main__":
    sys.exit(main())
