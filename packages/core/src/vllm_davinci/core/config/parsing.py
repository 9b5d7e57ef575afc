"""Options from the value of vLLM's `additional_config`: parsed once, then carried with it."""

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from vllm_davinci.core.config.given import ABSENT, Given, given_options, ill_typed, value_at
from vllm_davinci.core.config.options import OVERLAP_PRESETS, DavinciConfig, SchedulerOptions
from vllm_davinci.core.config.setting import Setting
from vllm_davinci.core.config.table import accepted_names, table
from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Keys that vLLM itself puts into additional_config (config/vllm.py).
KEYS_OF_VLLM = frozenset({"gdn_prefill_backend", "kda_decode_backend", "kda_prefill_backend"})


class ResolvedOptions(dict[str, Any]):
    """`additional_config` of an engine whose options are resolved, with their typed form.

    settings: everything that was given or decided, of options and of vLLM's configuration, in
              that order; the platform adds what it changes

    A dictionary, because vLLM hashes and reads `additional_config` as one; it travels to worker
    processes with vLLM's configuration, so that no layer parses again. Not to be changed.
    """

    def __init__(
        self, options: Mapping[str, Any], config: DavinciConfig, settings: list[Setting]
    ) -> None:
        super().__init__(options)
        self.config = config
        self.settings = settings


def get_config(vllm_config: "VllmConfig") -> DavinciConfig:
    """The options of an engine.

    Parses those that the platform has not resolved, and raises what parse_config raises then.
    """
    additional = vllm_config.additional_config
    return additional.config if is_resolved(vllm_config) else parse_config(additional)


def get_settings(vllm_config: "VllmConfig") -> list[Setting]:
    """Settings that were given or decided for a resolved engine; more can be added."""
    additional = vllm_config.additional_config
    return additional.settings if isinstance(additional, ResolvedOptions) else []


def is_resolved(vllm_config: "VllmConfig") -> bool:
    """Whether this plugin's platform has resolved the options of an engine."""
    return isinstance(vllm_config.additional_config, ResolvedOptions)


def parse_config(additional_config: Any) -> DavinciConfig:
    """Options from the value of `--additional-config`.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for an unknown key (naming the nearest known one), an ill-typed
    value, a contradiction, and a key that is refused.
    """
    return validated(given_options(additional_config))


def validated(given: Given) -> DavinciConfig:
    """The typed form of options that are under today's keys."""
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
    """Dotted keys of options that were given, whatever their values."""
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
    from vllm.config import SchedulerConfig  # vllm.config is what imports the platform, and this

    return [field.name for field in dataclasses.fields(SchedulerConfig)]
