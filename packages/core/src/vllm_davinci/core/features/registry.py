"""All features: the `FEATURES` rows of this folder's files, and their refusals."""

from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pkgutil import iter_modules

from vllm_davinci.core.errors import RELEASE, ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.features.feature import Engine, Feature, is_always

_PACKAGE = __name__.rpartition(".")[0]


@cache
def features() -> Mapping[str, Feature]:
    """Key -> feature, in settling order. Imports the folder at the first call."""
    folder = import_module(_PACKAGE).__path__
    modules = [import_module(f"{_PACKAGE}.{each.name}") for each in iter_modules(folder)]
    rows: dict[str, Feature] = {}
    for row in (row for each in modules for row in getattr(each, "FEATURES", ())):
        if rows.setdefault(row.key, row) is not row:
            raise ValueError(f"Two feature rows have the key {row.key!r}. Give one another flag.")
    order = TopologicalSorter({key: row.after for key, row in rows.items()})
    return {key: rows[key] for key in order.static_order()}


def in_use(engine: Engine) -> list[Feature]:
    """The features that the engine uses."""
    return [each for each in features().values() if each.is_asked(engine)]


def named(engine: Engine) -> list[Feature]:
    """The engine's features except those of every engine: for log and `vllm-davinci config`."""
    return [each for each in in_use(engine) if each.is_asked is not is_always]


def settle(engine: Engine) -> None:
    """Settles every feature of the engine. Idempotent.

    Raises UnsupportedFeatureError for an unsupported model and ConfigurationError for unsupported
    options, all in one error.
    """
    asked = {each.key: each for each in in_use(engine)}
    if models := [_of_model(each, engine) for each in asked.values() if _is_models(each)]:
        raise UnsupportedFeatureError(" ".join(models))
    if refused := [each for row in asked.values() for each in refusals(row, asked, engine)]:
        raise ConfigurationError(" ".join(refused))
    for each in asked.values():
        if each.settle is not None:
            each.settle(engine)


def refusals(row: Feature, asked: Mapping[str, Feature], engine: Engine) -> Iterator[str]:
    """Messages about requested features that `row` excludes.

    asked: the engine's features, by key
    """
    given = row.as_given(engine) if row.as_given else row.key
    if not row.is_served:
        because = row.because(engine) if callable(row.because) else row.because
        reason = f": {because}" if because else ""
        yield f"{given} ({row.title}) is not supported in {RELEASE}{reason}. {row.instead}"
    for key in (key for key in row.excludes if key in asked):
        reason = f" because {row.excludes[key]}" if row.excludes[key] else ""
        yield _excluded(row, asked[key], engine, reason)


def _excluded(row: Feature, other: Feature, engine: Engine, reason: str) -> str:
    if row.flag and other.flag:
        end = "Remove one of the two."
        return f"{other.flag} is not supported with {row.flag} in {RELEASE}{reason}. {end}"
    flag, trait = (row.flag, other.title) if row.flag else (other.flag, row.title)
    named = ", ".join(engine.model.architectures)
    return f"{flag} is not supported in {RELEASE} for {named}, with {trait}{reason}. Remove it."


def _is_models(row: Feature) -> bool:
    return not row.flag and not row.is_served


def _of_model(row: Feature, engine: Engine) -> str:
    because = row.because(engine) if callable(row.because) else row.because
    model = engine.model
    return (
        f"{', '.join(model.architectures)} of {model.model!r} needs {row.title}, which is not "
        f"supported in {RELEASE}{f': {because}' if because else ''}. {row.instead}"
    )
