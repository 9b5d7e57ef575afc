"""The options that a user gave, under today's keys, and what became of the others."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vllm_davinci.core.config.other_keys import OTHER_KEYS
from vllm_davinci.core.config.row import Means, NoEffect, Row
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError

ABSENT = object()


class Given(NamedTuple):
    """Options as they were given.

    options:  nested, under today's keys; vLLM's own keys are among them
    spelling: today's key -> the key in use, where that differs
    without_effect: keys that are accepted and do nothing, with the reasons
    """

    options: dict[str, Any]
    spelling: dict[str, str]
    without_effect: list[Setting]

    def notes(self) -> Iterator[str]:
        """Sentences about keys that are not today's."""
        for key, used in self.spelling.items():
            yield f"additional_config key {used!r} means {key}; prefer that spelling."
        for setting in self.without_effect:
            yield f"additional_config key {setting.key!r} {setting.reason}."


def given_options(additional_config: Any) -> Given:
    """Reads the value of `--additional-config`, which stays as it is.

    additional_config: a mapping of JSON values, or None
    Raises ConfigurationError for any other type, for a key that is refused, for a key without
    effect whose value has another type, and for a spelling whose value differs from that of
    today's key.
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
    """Raises ConfigurationError for a value that is not of the row's type."""
    try:
        TypeAdapter(row.type, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        raise ConfigurationError(ill_typed(row.key, value, error.errors()[0]["msg"])) from None


def ill_typed(key: str, value: Any, message: str) -> str:
    """The error about a value. message: pydantic's"""
    expectation = message.removeprefix("Value error, ").replace("Input should be", "expected")
    return (
        f"additional_config key {key!r} is {value!r} ({type(value).__name__}): "
        f"{expectation.rstrip('.')}."
    )


def value_at(options: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; ABSENT where there is none."""
    value: Any = options
    for name in key.split("."):
        value = value.get(name, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def without(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy without a dotted key, which is there."""
    name, _, rest = key.partition(".")
    kept = {each: value for each, value in options.items() if each != name}
    return {**kept, name: without(options[name], rest)} if rest else kept


def with_value(options: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with a value. A section that is no object stays: the typed model reports it."""
    name, _, rest = key.partition(".")
    if not rest:
        return {**options, name: value}
    inner = options.get(name, {})
    if not isinstance(inner, Mapping):
        return dict(options)
    return {**options, name: with_value(inner, rest, value)}
