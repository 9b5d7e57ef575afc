"""Finds entries by name: each is a class in its own file, imported on demand."""

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import ClassVar, Protocol, TypeVar

_PACKAGE = __name__.rpartition(".")[0]


class Named(Protocol):
    """A class with a name."""

    name: ClassVar[str]


Entry = TypeVar("Entry", bound=type[Named])


class Registry(Mapping[str, Entry]):
    """The classes registered by the files of one folder, by name.

    folder: of this package
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._is_read = False
        self._entries: dict[str, Entry] = {}

    def register(self, entry: Entry) -> Entry:
        """Decorates a class. Raises ValueError if another one has the name."""
        other = self._entries.setdefault(entry.name, entry)
        if other is not entry:
            raise ValueError(
                f"{entry.__module__} registers {entry.name}, which {other.__module__} has "
                "registered. Choose another name."
            )
        return entry

    def nearest(self, name: str) -> str | None:
        """The entry with the closest name to an unknown one, or None."""
        close = difflib.get_close_matches(name, list(self), n=1)
        return close[0] if close else None

    def __getitem__(self, name: str) -> Entry:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def read(self) -> dict[str, Entry]:
        """The entries; imports the folder's files first."""
        if not self._is_read:
            self._is_read = True
            package = import_module(f"{_PACKAGE}.{self._folder}")
            for module in iter_modules(package.__path__):
                import_module(f"{package.__name__}.{module.name}")
        return self._entries
