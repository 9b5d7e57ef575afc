"""Entries found by name: each is a class in a file of its own, imported when it is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import ClassVar, Protocol, TypeVar

_PACKAGE = __name__.rpartition(".")[0]


class Named(Protocol):
    """A class that says its own name."""

    name: ClassVar[str]


Entry = TypeVar("Entry", bound=type[Named])


class Registry(Mapping[str, Entry]):
    """The classes that the files of one folder register, by their names.

    folder: of this package
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._is_read = False
        self._entries: dict[str, Entry] = {}

    def register(self, entry: Entry) -> Entry:
        """Decorates a class. Raises ValueError where another one has the name."""
        other = self._entries.setdefault(entry.name, entry)
        if other is not entry:
            raise ValueError(
                f"{entry.__module__} registers {entry.name}, which {other.__module__} has "
                "registered. Give it a name of its own."
            )
        return entry

    def nearest(self, name: str) -> str | None:
        """The entry whose name is closest to one that is unknown, or None without a close one."""
        close = difflib.get_close_matches(name, list(self), n=1)
        return close[0] if close else None

    def __getitem__(self, name: str) -> Entry:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def read(self) -> dict[str, Entry]:
        """The entries, once the folder's files are imported."""
        if not self._is_read:
            self._is_read = True
            package = import_module(f"{_PACKAGE}.{self._folder}")
            for module in iter_modules(package.__path__):
                import_module(f"{package.__name__}.{module.name}")
        return self._entries
