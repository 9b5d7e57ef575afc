"""Replaces components of vLLM's runner when it assigns them to its attributes."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Component = TypeVar("Component")


class adopted(Generic[Component]):  # noqa: N801  a decorator
    """Descriptor that passes each value assigned to a runner's attribute through a method.

    vLLM's runner names its classes in its code and stores their objects in attributes. The
    decorated method gets such an object and returns the one to store: every reader sees it, even in
    the vLLM method that has just assigned it. None is stored unchanged.
    """

    def __init__(self, adopt: Callable[[Any, Any], Component]) -> None:
        self._adopt = adopt
        self.__doc__ = adopt.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, runner: Any, owner: type | None = None) -> Component:
        if runner is None:
            return self  # type: ignore[return-value]
        try:
            stored: Component = runner.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{type(runner).__name__} has no {self._name} yet.") from None
        return stored

    def __set__(self, runner: Any, value: Any) -> None:
        runner.__dict__[self._name] = None if value is None else self._adopt(runner, value)

    def __delete__(self, runner: Any) -> None:
        if runner.__dict__.pop(self._name, self) is self:
            raise AttributeError(f"{type(runner).__name__} has no {self._name} to delete.")


def converted(component: Any, ours: type[Component]) -> Component:
    """Changes the object's class, in place."""
    component.__class__ = ours
    assert isinstance(component, ours)
    return component


def behind(ours: type[Any], theirs: type[Any]) -> type[Any]:
    """Returns a class that inherits from ours first, then from the class that vLLM chose."""
    return type(f"NPU{theirs.__name__}", (ours, theirs), {})
