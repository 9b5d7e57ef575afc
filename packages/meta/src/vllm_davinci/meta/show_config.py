"""`vllm-davinci config MODEL`: shows every value of an engine, who decided it, and why.

vllm-davinci config MODEL -- --tensor-parallel-size 2 --additional-config '{"overlap": "auto"}'
    the options that follow `--` are those of `vllm serve`
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_davinci.meta import core_access
from vllm_davinci.meta.engine_configuration import engine_configuration, given_flags
from vllm_davinci.meta.errors import ExplanationError, MetaError
from vllm_davinci.meta.given_arguments import problem_of_engine

if TYPE_CHECKING:
    from vllm_davinci.core.config.setting import Setting

COMMAND = "vllm-davinci config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.usage = "%(prog)s MODEL [options] [-- OPTIONS OF VLLM SERVE]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="a model's directory, or its name on the hub")
    parser.add_argument("--changed", action="store_true", help="leave out values at their default")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    """Exit status 0 with an answer; 1 if no such engine is possible, with the reason.

    engine_arguments: options of `vllm serve`
    """
    console = Console(stderr=True)
    try:
        sections = _sections(options.model, engine_arguments)
    except MetaError as error:
        console.print(f"{COMMAND}: {error}", markup=False, soft_wrap=True)
        return 1
    if options.changed:
        sections = {
            title: [setting for setting in settings if setting.source != "default"]
            for title, settings in sections.items()
        }
    if options.json:
        print(json.dumps({title: list(map(_row, rows)) for title, rows in sections.items()}))
    else:
        print_settings(sections, Console())
    return 0


def _sections(model: str, engine_arguments: list[str]) -> dict[str, list[Setting]]:
    if (problem := problem_of_engine(model, engine_arguments)) is not None:
        raise ExplanationError(problem)
    core_access.prepare()
    from vllm_davinci.core.config.parsing import get_config
    from vllm_davinci.core.device.soc import soc_of
    from vllm_davinci.core.features.report import feature_settings, option_settings, vllm_settings
    from vllm_davinci.core.features.routed_experts import communication_settings
    from vllm_davinci.core.platform import NPUPlatform

    vllm_config = engine_configuration(COMMAND, model, engine_arguments)
    flags = given_flags(COMMAND, engine_arguments)
    soc = soc_of(NPUPlatform.get_device_name())
    return {
        "vLLM": [
            *vllm_settings(vllm_config, flags),
            *communication_settings(vllm_config, get_config(vllm_config), soc),
        ],
        "additional_config": option_settings(vllm_config),
        "features": feature_settings(vllm_config, flags),
    }


def _row(setting: Setting) -> dict[str, Any]:
    value = setting.value if isinstance(setting.value, bool | int | float | list) else None
    return {
        "key": setting.key,
        "value": value if setting.value is None or value is not None else str(setting.value),
        "source": setting.source.value,
        "reason": setting.reason,
    }


def print_settings(sections: dict[str, list[Setting]], console: Console) -> None:
    """Prints one row per value; sections of `additional_config` stay together."""
    for title, settings in sections.items():
        table = Table(title=title, title_justify="left")
        for column in ("key", "value", "source", "reason"):
            table.add_column(column, overflow="fold")
        for _, group in groupby(settings, key=lambda setting: setting.key.rpartition(".")[0]):
            table.add_section()
            for setting in group:
                cells = (setting.key, str(setting.value), setting.source.value, setting.reason)
                table.add_row(*map(Text, cells))
        console.print(table)
