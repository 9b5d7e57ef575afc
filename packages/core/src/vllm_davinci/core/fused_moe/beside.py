"""The moments in a layer of routed experts at which work on another stream may begin."""

from typing import Protocol


class Beside(Protocol):
    """Called by the routed experts, on the main stream, as they come along. Each once, in order."""

    def chosen(self) -> None:
        """Every token's experts are known, or its row is about to leave for them."""

    def dispatched(self) -> None:
        """Rows are at their experts."""

    def computed(self) -> None:
        """The experts' products are launched; results are about to return."""


class _Alone:
    def chosen(self) -> None:
        """Nothing runs beside."""

    def dispatched(self) -> None:
        """Nothing runs beside."""

    def computed(self) -> None:
        """Nothing runs beside."""


ALONE: Beside = _Alone()
