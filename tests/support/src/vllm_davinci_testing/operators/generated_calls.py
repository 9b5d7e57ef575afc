"""Calls that break one rule of an operator's row, generated from the rule and a legal call.

A common rule states its values (`Constraint.form`): dtypes, sizes, strides, numbers. Changes that
break the rule follow from these. Another rule may refuse a changed call first, so each rule has
several changes; the first phase shows which of them breaks it. `illegal_calls` tests other kinds of
rules, and conditional rules.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vllm_davinci.vnpu.operator_rows import Constraint
from vllm_davinci_testing.operators.aclnn import Number
from vllm_davinci_testing.operators.legal_calls import A2, A3, A310P, Operand

DTYPES = (
    *("float32", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool", "float64"),
    *("int16", "uint16", "uint32", "complex64"),
)
NUMBERS = ("float64", "float32", "int64", "int32", "int8")
MOST_ELEMENTS = 1 << 33  # largest operand: memory is reserved, but never written
_SOCS = {"A2": A2, "A3": A3, "310P": A310P}

Changes = dict[str, Any]


def plain(name: str) -> str:
    """Returns an argument's name as in rows."""
    return name.replace("_", "").lower()


def place_of(row: Constraint) -> tuple[str, str]:
    """Returns a chip and CANN release that have the rule, if possible the chip and release of most
    tests.
    """
    soc = next(soc for chip, soc in _SOCS.items() if chip in row.chips.split(", "))
    return soc, "8.5" if row.since <= "8.5" <= row.until else row.since


def _resized(operand: Operand, *sizes: int) -> Iterator[Operand]:
    if all(size >= 0 for size in sizes) and math.prod(sizes) <= MOST_ELEMENTS:
        yield operand(sizes=tuple(sizes))


def _with_size(operand: Operand, dimension: int, size: int) -> Iterator[Operand]:
    if -len(operand.sizes) <= dimension < len(operand.sizes):
        sizes = list(operand.sizes)
        sizes[dimension] = size
        yield from _resized(operand, *sizes)


def _of_other_dtype(value: Any, allowed: list[str]) -> Iterator[Any]:
    if isinstance(value, Number):
        yield from (Number(1, getattr(torch, dtype)) for dtype in NUMBERS if dtype not in allowed)
    elif isinstance(value, Operand):
        yield from (value(dtype=dtype) for dtype in DTYPES if dtype not in allowed)


def _of_other_dims(operand: Operand, least: int, most: int) -> Iterator[Operand]:
    sizes = operand.sizes
    if most < 8:
        yield from _resized(operand, *[1] * (most + 1 - len(sizes)), *sizes)
    if least > 0:
        yield from _resized(operand, *sizes[len(sizes) - least + 1 :])
        yield from _resized(operand, *sizes[: least - 1])


def _by_columns(operand: Operand) -> Iterator[Operand]:
    if len(operand.sizes) == 2:
        yield operand(by_columns=True)


def _strided(operand: Operand) -> Iterator[Operand]:
    yield operand(apart=True)
    yield from _by_columns(operand)


def _emptied(operand: Operand) -> Iterator[Operand]:
    for dimension in range(len(operand.sizes)):
        yield from _with_size(operand, dimension, 0)


def _of_other_size(operand: Operand, dimension: int, allowed: list[int]) -> Iterator[Operand]:
    for size in (max(allowed) + 1, 2 * max(allowed), max(allowed) // 2, max(allowed) + 64):
        if size not in allowed:
            yield from _with_size(operand, dimension, size)


def _beyond(operand: Operand, dimension: int, *bounds: int) -> Iterator[Operand]:
    least, most, multiple = bounds
    between = [least + multiple // 2] if multiple > 1 else []
    for size in (least - multiple, least - 1, most + multiple, most + 1, *between):
        yield from _with_size(operand, dimension, size)


def _of_any_other_sizes(operand: Operand) -> Iterator[Operand]:
    for dimension, size in enumerate(operand.sizes):
        for other in (size + 1, size // 2, 2 * size, size - 1):
            if other != size:
                yield from _with_size(operand, dimension, other)
    yield from _resized(operand, 1, *operand.sizes)


def _other_number(value: Any, numbers: Iterator[int]) -> Iterator[Any]:
    for number in numbers:
        if -(2**63) <= number < 2**63:
            yield type(value)(number) if isinstance(value, ctypes._SimpleCData) else number


def _outside(value: Any, least: int, most: int) -> Iterator[Any]:
    yield from _other_number(value, iter((most + 1, least - 1)))


def _other_choice(value: Any, allowed: list[Any]) -> Iterator[Any]:
    if isinstance(allowed[0], str):
        yield "XYZ"
    else:
        candidates = (*range(min(allowed) - 1, max(allowed) + 2), max(allowed) + 100)
        yield from _other_number(value, iter(n for n in candidates if n not in allowed))


_OF_OPERANDS: dict[str, Callable[..., Iterator[Any]]] = {
    "dims": _of_other_dims,
    "contiguous": _strided,
    "contiguous_rows": _by_columns,
    "contiguous_or_transposed": _strided,
    "not_empty": _emptied,
    "size_in": _of_other_size,
    "size_between": _beyond,
    "same_dtype": lambda operand, _: _of_other_dtype(operand, [operand.dtype]),
    "same_size": lambda operand, *_: _of_any_other_sizes(operand),
    "same_sizes": lambda operand, _: _of_any_other_sizes(operand),
}
_OF_NUMBERS: dict[str, Callable[..., Iterator[Any]]] = {
    "between": _outside,
    "one_of": _other_choice,
}
_SUPPLIED = (Operand((7,), "float32"), Operand((64,)), Operand((64,), "int32"))


def _broken(value: Any, kind: str, bounds: list[Any]) -> Iterator[Any]:
    """Yields replacements of a valid value that break the rule."""
    if isinstance(value, Operand) and value.is_tiled:
        return  # tiles have their own sizes and dtype
    if kind == "absent":
        yield from _SUPPLIED
    elif kind == "present":
        yield None
    elif isinstance(value, list):
        if kind == "same_count":
            yield from (value[:-1], [*value, value[-1]])
        for first in _broken(value[0], kind, bounds):
            yield [first for _ in value]
            yield [first, *value[1:]]
    elif kind == "dtype":
        yield from _of_other_dtype(value, *bounds)
    elif isinstance(value, Operand) and kind in _OF_OPERANDS:
        yield from _OF_OPERANDS[kind](value, *bounds)
    elif value is not None and kind in _OF_NUMBERS:
        yield from _OF_NUMBERS[kind](value, *bounds)


def _in_float16(legal: Mapping[str, Any]) -> Changes:
    """Changes a call's bf16 operands to fp16, for older chips."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(each) for each in value]
        is_bfloat16 = isinstance(value, Operand) and value.dtype == "bfloat16"
        return value(dtype="float16") if is_bfloat16 else value

    return {name: changed(value) for name, value in legal.items()}


def breaking(row: Constraint, legal: Mapping[str, Any]) -> list[Changes]:
    """Returns replacements for the legal call's arguments; each breaks the rule."""
    if row.form is None:
        return []
    kind, *bounds = row.form
    names = {plain(name): name for name in legal}
    name = names[plain(row.argument)]
    changes: list[Changes] = [{name: value} for value in _broken(legal[name], kind, bounds)]
    if place_of(row)[0] == A310P:
        older = _in_float16(legal)
        # A legal call of newer chips breaks the rule without changes.
        changes += [{}, *({**older, name: value} for value in _broken(older[name], kind, bounds))]
    return changes


def key_of(row: Constraint) -> str:
    """Returns text that identifies a rule."""
    parts = (row.operator, row.argument, row.rule, row.chips, row.since, row.until, row.source)
    return " | ".join(parts)


def names(row: Constraint, said: str) -> bool:
    """True if the rule made this refusal."""
    return (
        f"returned {row.status}: {row.operator}: {row.argument} (argument " in said
        and f"but must {row.rule} on " in said
    )


def answers_to_breaking(
    row: Constraint, legal: Mapping[str, Any], answer: Callable[[str, Changes], str]
) -> list[str]:
    """Returns answers to calls that break the rule, up to the first refusal by it."""
    said: list[str] = []
    for changes in breaking(row, legal):
        said.append(answer(row.operator.removeprefix("aclnn"), {**legal, **changes}))
        if names(row, said[-1]):
            break
    return said
