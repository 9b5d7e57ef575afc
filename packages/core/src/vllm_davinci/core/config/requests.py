"""Options that vLLM's flags and environment variables ask for.

vLLM has flags of its own for dual-batch overlap, which reach an implementation that is for CUDA.
They are taken over here and reset, before vLLM looks at them. Other Ascend plugins have
environment variables.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vllm_davinci.core.config.environment_variables import OTHER_VARIABLES
from vllm_davinci.core.config.given import ABSENT, Given, value_at, with_value
from vllm_davinci.core.config.options import OVERLAP_PRESETS
from vllm_davinci.core.config.row import Means
from vllm_davinci.core.config.setting import Setting, Source, shown
from vllm_davinci.core.errors import ConfigurationError

# vLLM's flags, where they are in its ParallelConfig, their defaults there, and our option.
# A threshold that is given with its default value cannot be told from one that is not given.
THRESHOLDS = {
    "dbo_prefill_token_threshold": (512, "dbo.min_total_tokens_to_split"),
    "dbo_decode_token_threshold": (32, "dbo.min_decode_tokens_to_split"),
}


class Requests(NamedTuple):
    """Requests that became options.

    given:    the options with them
    settings: one for each; the reason is the flag or the variable as it was typed
    notes:    sentences for the user
    """

    given: Given
    settings: list[Setting]
    notes: list[str]


def serve_requests(given: Given, parallel: Any, environ: Mapping[str, str]) -> Requests:
    """Moves flags and variables into the options, and resets the flags.

    Raises ConfigurationError when a flag contradicts an option, when a variable does not parse,
    and when two variables contradict each other. An option wins over a variable.
    """
    options = given.options
    settings, notes = [], []
    for flag in _flags(parallel):
        present = value_at(options, flag.key)
        if present not in (ABSENT, flag.value):
            raise ConfigurationError(
                f"{flag.reason} asks for {flag.key} = {flag.value!r} and additional_config sets "
                f"{given.spelling.get(flag.key, flag.key)} to {present!r}. Remove one of the two."
            )
        options = with_value(options, flag.key, flag.value)
        settings.append(flag)
        notes.append(f"{flag.reason} is served as {flag.key} = {flag.value!r}.")
    _reset(parallel)
    for variable in _variables(environ):
        against = _against(variable, options)
        if against is not None:
            notes.append(f"{variable.reason} has no effect: additional_config sets {against}.")
        elif value_at(options, variable.key) is ABSENT:
            options = with_value(options, variable.key, variable.value)
            settings.append(variable)
            notes.append(
                f"{variable.reason} is served as {variable.key} = {shown(variable.value)}; prefer "
                "that option."
            )
    return Requests(given._replace(options=options), settings, notes)


def _flags(parallel: Any) -> Iterator[Setting]:
    if parallel.enable_dbo:
        yield Setting("dbo.enabled", True, Source.FLAG, "--enable-dbo")
    if parallel.ubatch_size > 1:
        flag = f"--ubatch-size {parallel.ubatch_size}"
        yield Setting("dbo.enabled", True, Source.FLAG, flag)
        yield Setting("dbo.num_ubatches", parallel.ubatch_size, Source.FLAG, flag)
    for field, (default, key) in THRESHOLDS.items():
        value = getattr(parallel, field)
        if value != default:
            yield Setting(key, value, Source.FLAG, f"--{field.replace('_', '-')} {value}")


def _reset(parallel: Any) -> None:
    parallel.enable_dbo = False
    parallel.ubatch_size = 0
    for field, (default, _) in THRESHOLDS.items():
        setattr(parallel, field, default)


def _variables(environ: Mapping[str, str]) -> list[Setting]:
    found: dict[str, Setting] = {}
    for row in OTHER_VARIABLES:
        if not isinstance(row.fate, Means):
            continue
        key, text = row.fate.key, environ.get(row.key, "")
        if text not in ("", "0", "1"):
            raise ConfigurationError(
                f"{row.key}={text!r} is not valid: expected 0 or 1. Prefer additional_config key "
                f"{key!r}."
            )
        if text != "1":
            continue
        setting = Setting(key, row.fate.value, Source.VARIABLE, f"{row.key}=1")
        other = found.setdefault(key, setting)
        if other.value != setting.value:
            raise ConfigurationError(
                f"{other.reason} and {setting.reason} ask for different values of {key}. Unset "
                f"them, and set additional_config key {key!r} to {shown(other.value)} or "
                f"{shown(setting.value)}."
            )
    return list(found.values())


def _against(variable: Setting, options: Mapping[str, Any]) -> str | None:
    """The option that contradicts a variable."""
    preset = options.get("overlap")
    meant = OVERLAP_PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if meant.get(variable.key, variable.value) != variable.value:
        return f"overlap = {preset!r}"
    present = value_at(options, variable.key)
    return None if present in (ABSENT, variable.value) else f"{variable.key} = {shown(present)}"
