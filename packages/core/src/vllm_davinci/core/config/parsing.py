"""Options of an engine: read, merged with vLLM's flags and other plugins' variables, validated.

vLLM's own flags for dual-batch overlap select an implementation for CUDA. They are converted to
options and reset here before vLLM reads them, like the keys and environment variables of other
Ascend plugins.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from vllm_davinci.core.config.environment_variables import OTHER_VARIABLES
from vllm_davinci.core.config.options import OVERLAP_PRESETS, DavinciConfig, SchedulerOptions
from vllm_davinci.core.config.other_keys import OTHER_KEYS
from vllm_davinci.core.config.row import Means, NoEffect, Row
from vllm_davinci.core.config.setting import Setting, Source, shown
from vllm_davinci.core.config.table import accepted_names, table
from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ABSENT = object()


class Given(NamedTuple):
    """Options as the user gave them, renamed to current keys, with a reason for each one ignored.

    options:  nested, under current keys; includes vLLM's own keys
    spelling: current key -> the key the user wrote, if different
    without_effect: accepted keys that have no effect, with reasons
    """

    options: dict[str, Any]
    spelling: dict[str, str]
    without_effect: list[Setting]

    def notes(self) -> Iterator[str]:
        """Messages about keys that are not current."""
        for key, used in self.spelling.items():
            yield f"additional_config key {used!r} means {key}; prefer that spelling."
        for setting in self.without_effect:
            yield f"additional_config key {setting.key!r} {setting.reason}."


def given_options(additional_config: Any) -> Given:
    """Reads the value of `--additional-config` without changing it.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for another type, a refused key, a wrongly typed key without effect,
    and an old spelling that contradicts the current key.
    """
    if additional_config is None:
        additional_config = {}
    if not isinstance(additional_config, Mapping):
        raise ConfigurationError(
            f"additional_config is a {type(additional_config).__name__}, and must be a JSON "
            "object: --additional-config '{\"dbo\": {}}'."
        )
    given = Given(dict(additional_config), {}, [])
    options: Mapping[str, Any] = given.options
    errors = []
    for row in OTHER_KEYS:
        if (value := value_at(options, row.key)) is ABSENT:
            continue
        options = without(options, row.key)
        if error := row.refusal(value):
            errors.append(error)
        elif isinstance(row.fate, NoEffect):
            check_type(row, value)
            given.without_effect.append(_has_no_effect(row, value, row.fate.because))
        elif isinstance(row.fate, Means):
            options = _moved(options, row, row.fate, value, given)
    if errors:
        raise ConfigurationError(" ".join(errors))
    return given._replace(options=dict(options))


def _moved(
    options: Mapping[str, Any], row: Row, fate: Means, value: Any, given: Given
) -> Mapping[str, Any]:
    if fate.only_with and value_at(options, fate.only_with) is not True:
        check_type(row, value)
        because = f"{fate.only_with} is false"
        given.without_effect.append(_has_no_effect(row, value, because))
        return options
    present = value_at(options, fate.key)
    if present not in (ABSENT, value):
        raise ConfigurationError(
            f"additional_config sets {row.key!r} to {value!r} and its replacement {fate.key!r} to "
            f"{present!r}. Remove {row.key!r}."
        )
    if present is ABSENT:
        given.spelling[fate.key] = row.key
    return with_value(options, fate.key, value)


def _has_no_effect(row: Row, value: Any, because: str) -> Setting:
    reason = NoEffect(because).told()
    return Setting(row.key, value, Source.ADDITIONAL_CONFIG, reason)


def check_type(row: Row, value: Any) -> None:
    """Raises ConfigurationError if the value does not have the row's type."""
    try:
        TypeAdapter(row.type, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        raise ConfigurationError(ill_typed(row.key, value, error.errors()[0]["msg"])) from None


def ill_typed(key: str, value: Any, message: str) -> str:
    """The error for an ill-typed value. message: pydantic's"""
    expectation = message.removeprefix("Value error, ").replace("Input should be", "expected")
    return (
        f"additional_config key {key!r} is {value!r} ({type(value).__name__}): "
        f"{expectation.rstrip('.')}."
    )


def value_at(options: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; ABSENT if missing."""
    value: Any = options
    for name in key.split("."):
        value = value.get(name, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def without(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy without the dotted key, which must exist."""
    name, _, rest = key.partition(".")
    kept = {each: value for each, value in options.items() if each != name}
    return {**kept, name: without(options[name], rest)} if rest else kept


def with_value(options: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with the value set. Keeps a section that is no object: the typed model reports it."""
    name, _, rest = key.partition(".")
    if not rest:
        return {**options, name: value}
    inner = options.get(name, {})
    if not isinstance(inner, Mapping):
        return dict(options)
    return {**options, name: with_value(inner, rest, value)}


# vLLM's flags: their field in ParallelConfig, their default there, and our option. A threshold
# given as its default counts as not given.
THRESHOLDS = {
    "dbo_prefill_token_threshold": (512, "dbo.min_total_tokens_to_split"),
    "dbo_decode_token_threshold": (32, "dbo.min_decode_tokens_to_split"),
}


class Requests(NamedTuple):
    """Flags and variables that became options.

    given:    the options including them
    settings: one for each; the reason is the flag or variable as typed
    notes:    messages for the user
    """

    given: Given
    settings: list[Setting]
    notes: list[str]


def serve_requests(given: Given, parallel: Any, environ: Mapping[str, str]) -> Requests:
    """Moves flags and variables into the options, and resets the flags.

    Raises ConfigurationError if a flag contradicts an option, a variable does not parse, or two
    variables contradict each other. Options win over variables.
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
    """The option that contradicts a variable, as text; None without one."""
    preset = options.get("overlap")
    meant = OVERLAP_PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if meant.get(variable.key, variable.value) != variable.value:
        return f"overlap = {preset!r}"
    present = value_at(options, variable.key)
    return None if present in (ABSENT, variable.value) else f"{variable.key} = {shown(present)}"


# Keys that vLLM itself puts into additional_config (config/vllm.py).
KEYS_OF_VLLM = frozenset({"gdn_prefill_backend", "kda_decode_backend", "kda_prefill_backend"})


class ResolvedOptions(dict[str, Any]):
    """`additional_config` of an engine with resolved options, with their typed form.

    settings: every value given or decided, of options and of vLLM's configuration, in that order;
              the platform adds its changes

    A dictionary, because vLLM hashes and reads `additional_config` as one. It reaches worker
    processes with vLLM's configuration, so layers need not parse again. Must not be modified.
    """

    def __init__(
        self, options: Mapping[str, Any], config: DavinciConfig, settings: list[Setting]
    ) -> None:
        super().__init__(options)
        self.config = config
        self.settings = settings


def get_config(vllm_config: "VllmConfig") -> DavinciConfig:
    """The options of an engine.

    Parses options that the platform has not resolved; raises as parse_config does.
    """
    additional = vllm_config.additional_config
    return additional.config if is_resolved(vllm_config) else parse_config(additional)


def get_settings(vllm_config: "VllmConfig") -> list[Setting]:
    """Settings given or decided for a resolved engine; callers may append."""
    additional = vllm_config.additional_config
    return additional.settings if isinstance(additional, ResolvedOptions) else []


def is_resolved(vllm_config: "VllmConfig") -> bool:
    """True if this plugin's platform has resolved the engine's options."""
    return isinstance(vllm_config.additional_config, ResolvedOptions)


def parse_config(additional_config: Any) -> DavinciConfig:
    """Parses the value of `--additional-config`.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for an unknown key (naming the nearest known one), an ill-typed
    value, a contradiction, and a refused key.
    """
    return validated(given_options(additional_config))


def validated(given: Given) -> DavinciConfig:
    """The options, under current keys, in typed form."""
    options = {key: value for key, value in given.options.items() if key not in KEYS_OF_VLLM}
    try:
        config = DavinciConfig.model_validate(options)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_explain(error))) from None
    if contradictions := list(_contradictions(config, given)):
        raise ConfigurationError("; ".join(contradictions))
    return config


def non_default_options(config: DavinciConfig) -> dict[str, Any]:
    """Dotted key -> value for every option that differs from its default."""
    defaults = dict(flat(DavinciConfig()))
    return {key: value for key, value in flat(config) if defaults.get(key, ABSENT) != value}


def flat(config: BaseModel, section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every option."""
    for name in (*type(config).model_fields, *(config.model_extra or {})):
        key, value = f"{section}.{name}" if section else name, getattr(config, name)
        if isinstance(value, BaseModel):
            yield from flat(value, key)
        else:
            yield key, value


def keys_given(config: BaseModel, section: str = "") -> Iterator[str]:
    """Dotted keys of the options that were given, whatever their values."""
    for name in (*type(config).model_fields, *(config.model_extra or {})):
        key, value = f"{section}.{name}" if section else name, getattr(config, name)
        if isinstance(value, BaseModel):
            yield from keys_given(value, key)
        elif name in config.model_fields_set:
            yield key


def _explain(error: ValidationError) -> Iterator[str]:
    for detail in error.errors():
        location = [str(part) for part in detail["loc"]]
        key = ".".join(location)
        if detail["type"] == "extra_forbidden":
            names = accepted_names(location[:-1])
            yield _unknown(key, ".".join([*location[:-1], _nearest(location[-1], names)]))
        else:
            yield ill_typed(key, detail["input"], detail["msg"])


def _unknown(key: str, nearest: str) -> str:
    return f"additional_config has no key {key!r}. Did you mean {nearest!r}?"


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]


def _contradictions(config: DavinciConfig, given: Given) -> Iterator[str]:
    yield from _unmet_needs(config, given)
    yield from _against_preset(config)
    scheduler = config.ascend_scheduler_config
    known = [*SchedulerOptions.model_fields, *_scheduler_fields()]
    for name in scheduler.model_extra or ():
        if name not in known:
            section = "ascend_scheduler_config"
            yield _unknown(f"{section}.{name}", f"{section}.{_nearest(name, known)}")
    if scheduler.model_extra and not scheduler.enabled:
        names = ", ".join(scheduler.model_extra)
        yield f"ascend_scheduler_config sets {names} and is not enabled: remove them"


def _unmet_needs(config: DavinciConfig, given: Given) -> Iterator[str]:
    values = dict(flat(config)) | {each.key: each.value for each in given.without_effect}
    for row in table():
        if values.get(row.key, row.default) == row.default:
            continue
        for need in row.needs:
            if values.get(need.key) != need.value:
                yield f"{row.key} = {json.dumps(values[row.key])} {need.otherwise}"
                break


def _against_preset(config: DavinciConfig) -> Iterator[str]:
    asked = config.model_dump(exclude_unset=True)
    for key, meant in OVERLAP_PRESETS.get(config.overlap or "", {}).items():
        value = value_at(asked, key)
        if value not in (ABSENT, meant):
            yield (
                f"overlap = {config.overlap!r} stands for {key} = {json.dumps(meant)}, and "
                f"additional_config sets it to {json.dumps(value)}: remove one of the two"
            )


def _scheduler_fields() -> list[str]:
    # Not at the top: vllm.config imports the platform, which imports this module.
    from vllm.config import SchedulerConfig

    return [field.name for field in dataclasses.fields(SchedulerConfig)]
