"""Older keys of `additional_config`: other spellings of options, and some that do nothing."""

from collections.abc import Mapping
from typing import Any

from vllm_davinci.core.errors import ConfigurationError

# Older key -> the one that replaced it, with dots between section and name.
ALIASES: dict[str, str] = {
    "enable_graph_mode": "torchair_graph_config.enabled",
    "init_torchair_graph_batch_sizes": "torchair_graph_config.graph_batch_sizes_init",
    "dbo.num_micro_batches": "dbo.num_ubatches",
}

# Older keys that stand for nothing a release can turn on.
RETIRED: dict[str, str] = {
    "enable_inter_dp_scheduling": "it never had an effect",
    "trace_recompiles": "nothing is compiled without graph mode",
}

_ABSENT = object()


def canonical(additional_config: Any) -> dict[str, Any]:
    """The same options under today's keys. What is given stays as it is.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for any other type, for an older key whose value differs from that of
    its replacement, and for a retired key that is no bool.
    """
    if additional_config is None:
        return {}
    if not isinstance(additional_config, Mapping):
        raise ConfigurationError(
            f"additional_config is a {type(additional_config).__name__}, and must be a JSON "
            "object: --additional-config '{\"dbo\": {}}'."
        )
    options = dict(additional_config)
    for key in RETIRED:
        value = options.pop(key, True)
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"additional_config key {key!r} is {value!r} ({type(value).__name__}): "
                "expected a bool."
            )
    for alias, key in ALIASES.items():
        value, replacement = _value(options, alias), _value(options, key)
        if value is _ABSENT:
            continue
        if replacement not in (_ABSENT, value):
            raise ConfigurationError(
                f"additional_config sets {alias!r} to {value!r} and its replacement {key!r} to "
                f"{replacement!r}. Remove {alias!r}."
            )
        options = _moved(options, alias, key, value)
    return options


def older_keys(additional_config: Any) -> dict[str, str]:
    """Keys in use that are accepted without effect or under an older name -> what to know."""
    if not isinstance(additional_config, Mapping):
        return {}
    notes = {
        alias: f"is an older spelling of {key}"
        for alias, key in ALIASES.items()
        if _value(additional_config, alias) is not _ABSENT
    }
    return notes | {
        key: f"has no effect: {why}" for key, why in RETIRED.items() if key in additional_config
    }


def key_in_use(additional_config: Mapping[str, Any], key: str) -> str:
    """The spelling of an option that the user chose, today's key if none."""
    used = (alias for alias, today in ALIASES.items() if today == key)
    given = (each for each in used if _value(additional_config, each) is not _ABSENT)
    return key if _value(additional_config, key) is not _ABSENT else next(given, key)


def _value(options: Mapping[str, Any], key: str) -> Any:
    value: Any = options
    for name in key.split("."):
        value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value


def _moved(options: dict[str, Any], alias: str, key: str, value: Any) -> dict[str, Any]:
    """Copies of the options, with a value under `key` instead of `alias`."""
    *sections, name = alias.split(".")
    moved = dict(options)
    if sections:
        (section,) = sections
        moved[section] = {each: of for each, of in options[section].items() if each != name}
    else:
        del moved[name]
    section, name = key.split(".")
    inner = moved.get(section, {})
    if isinstance(inner, Mapping):  # else the typed model reports the section's type
        moved[section] = {**inner, name: value}
    return moved
