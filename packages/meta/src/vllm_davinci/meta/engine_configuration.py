"""Builds the configuration of `vllm serve MODEL OPTIONS` without starting an engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vllm_davinci.meta.errors import ExplanationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def engine_configuration(command: str, model: str, arguments: list[str]) -> VllmConfig:
    """Builds the configuration of an engine with these options. Raises ExplanationError.

    command: name of the command in messages about the options
    """
    from pydantic import ValidationError
    from vllm.engine.arg_utils import EngineArgs

    from vllm_davinci.core.config.described import described_only

    try:
        parsed = _parser(command).parse_args(["--model", model, *arguments])
        with described_only():
            return EngineArgs.from_cli_args(parsed).create_engine_config()
    except ValidationError as error:
        problems = "; ".join(str(each["msg"]) for each in error.errors())
        raise ExplanationError(problems) from error
    except (argparse.ArgumentError, OSError, RuntimeError, ValueError) as error:
        raise ExplanationError(str(error)) from error


def given_flags(command: str, arguments: list[str]) -> dict[str, str]:
    """Maps each field of vLLM's configuration that these options set to its option."""
    parser = _parser(command)
    not_given = object()
    parser.set_defaults(**dict.fromkeys(vars(parser.parse_args([])), not_given))
    parsed = vars(parser.parse_args(arguments))
    given = {name: value for name, value in parsed.items() if value is not not_given}
    flags = {name: f"--{name.replace('_', '-')} {value}" for name, value in given.items()}
    sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    for name in ("mode", "cudagraph_mode", *sizes):
        value = _of_compilation(given.get("compilation_config"), name)
        if value is not None:
            flags[name] = f"-cc.{name}={getattr(value, 'name', value)}"
    return flags


def _of_compilation(compilation: Any, name: str) -> Any:
    if isinstance(compilation, dict):
        return compilation.get(name)
    return getattr(compilation, name, None)


def _parser(command: str) -> FlexibleArgumentParser:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog=f"{command} MODEL ... --", exit_on_error=False)
    )
