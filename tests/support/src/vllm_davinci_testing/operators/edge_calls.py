"""Allowed calls at the edge of a documented rule, made from the rule and a legal call.

A rule's values (`Constraint.form`) give an argument's edges: each listed dtype, and the smallest
and largest number of dimensions, sizes and numbers. A value at the edge often requires other
changes, such as an output of the same dtype. An edge therefore has several calls: with the argument
changed alone, with one similar operand, and with all similar operands.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from vllm_davinci.vnpu.operator_rows import Constraint
from vllm_davinci_testing.operators.aclnn import Number
from vllm_davinci_testing.operators.generated_calls import MOST_ELEMENTS, Changes, names, plain
from vllm_davinci_testing.operators.legal_calls import Operand


class Edge(NamedTuple):
    """
    value: allowed value, as text
    calls: sets of replacements for the legal call's arguments; one must pass
    """

    value: str
    calls: list[Changes]


def edges(row: Constraint, legal: Mapping[str, Any]) -> list[Edge]:
    """Returns a rule's edges that the legal call does not cover."""
    if row.form is None:
        return []
    kind, *bounds = row.form
    name = {plain(name): name for name in legal}[plain(row.argument)]
    value = legal[name]
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, Operand) and not first.is_tiled and kind in _OF_OPERANDS:
        return [
            Edge(said, [changes for changes in _alone_and_together(legal, name, change) if changes])
            for said, change in _OF_OPERANDS[kind](first, *bounds)
        ]
    if kind in ("between", "one_of") and isinstance(first, (int, str, ctypes._SimpleCData)):
        allowed = bounds[0] if kind == "one_of" else bounds
        return [
            Edge(str(each), [{name: type(first)(each)}])
            for each in dict.fromkeys(allowed)
            if each != getattr(first, "value", first)
        ]
    return []


Change = Callable[[Operand], Operand | None]


def _dtypes(operand: Operand, allowed: list[str]) -> Iterator[tuple[str, Change]]:
    for dtype in allowed:
        if dtype not in (operand.dtype, "int4"):  # packed, so its sizes differ
            yield (
                dtype,
                lambda other, dtype=dtype: (  # type: ignore[misc]
                    other(dtype=dtype) if other.dtype == operand.dtype else None
                ),
            )


def _dims(operand: Operand, least: int, most: int) -> Iterator[tuple[str, Change]]:
    own = len(operand.sizes)

    def changed(count: int) -> Change:
        def change(other: Operand) -> Operand | None:
            if len(other.sizes) != own:
                return None
            if count > own:
                return other(sizes=(*[1] * (count - own), *other.sizes))
            merged = math.prod(other.sizes[: own - count + 1])
            return other(sizes=(merged, *other.sizes[own - count + 1 :]))

        return change

    for count in (max(least, 1), min(most, 8)):
        if count != own:
            yield f"{count} dimensions", changed(count)


def _sizes(operand: Operand, dimension: int, sizes: list[int]) -> Iterator[tuple[str, Change]]:
    if not -len(operand.sizes) <= dimension < len(operand.sizes):
        return
    own = operand.sizes[dimension]

    def changed(size: int) -> Change:
        def change(other: Operand) -> Operand | None:
            resized = tuple(size if each == own else each for each in other.sizes)
            if resized == other.sizes or math.prod(resized) > MOST_ELEMENTS:
                return None
            return other(sizes=resized)

        return change

    for size in sizes:
        if size != own:
            yield f"{size} in dimension {dimension}", changed(size)


_OF_OPERANDS: dict[str, Callable[..., Iterator[tuple[str, Change]]]] = {
    "dtype": _dtypes,
    "dims": _dims,
    "size_in": _sizes,
    "size_between": lambda operand, dimension, least, most, multiple: _sizes(
        operand, dimension, [least, most // multiple * multiple]
    ),
}


def _alone_and_together(legal: Mapping[str, Any], name: str, change: Change) -> Iterator[Changes]:
    """Yields changes of the argument alone, with each similar operand, and with all similar
    operands.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            several = [changed(each) for each in value]
            return None if None in several else several
        is_operand = isinstance(value, Operand) and not value.is_tiled
        return change(value) if is_operand else None

    own = changed(legal[name])
    if own is None:
        return
    yield {name: own}
    others = {
        other: new
        for other, value in legal.items()
        if other != name and not isinstance(value, Number) and (new := changed(value)) is not None
    }
    yield from ({name: own, other: new} for other, new in others.items())
    yield {name: own, **others}
    yield from (
        {name: own, **{each: new for each, new in others.items() if each != other}}
        for other in others
    )


def answers_at_edges(
    row: Constraint, legal: Mapping[str, Any], answer: Callable[[str, Changes], str]
) -> dict[str, str]:
    """Returns answers by edge: bytes of workspace, or the refusal of the call with only this
    argument changed.

    A refusal by the rule itself takes precedence.
    """
    found = {}
    for edge in edges(row, legal):
        said: list[str] = []
        for changes in edge.calls:
            said.append(answer(row.operator.removeprefix("aclnn"), {**legal, **changes}))
            if said[-1].isdigit():
                break
        own = [each for each in said if names(row, each)]
        if said:
            found[edge.value] = (own or [said[-1] if said[-1].isdigit() else said[0]])[0]
    return found
