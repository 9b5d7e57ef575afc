"""Every feature: the rows that the files of this folder name `FEATURES`."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from vllm_davinci.core.features.feature import Feature

_PACKAGE = __name__.rpartition(".")[0]


@cache
def features() -> Mapping[str, Feature]:
    """Name -> feature. Imports the folder's files at the first call."""
    folder = import_module(_PACKAGE).__path__
    modules = [import_module(f"{_PACKAGE}.{each.name}") for each in iter_modules(folder)]
    return {row.name: row for each in modules for row in getattr(each, "FEATURES", ())}
