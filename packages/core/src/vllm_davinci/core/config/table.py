"""The option table: every key of `additional_config`, ours and other plugins'.

Parser, log, errors, `vllm-davinci config`, reference page and JSON schema read it.
"""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.other_keys import OTHER_KEYS
from vllm_davinci.core.config.row import Means, Needs, NoEffect, Refused, Row, Works


def option_rows(model: type[BaseModel] = DavinciConfig, section: str = "") -> Iterator[Row]:
    """Rows of working options, in the order of their definition."""
    for name, field in model.model_fields.items():
        key = f"{section}.{name}" if section else name
        if (inner := section_model(field.annotation)) is not None:
            yield from option_rows(inner, key)
            continue
        needs = tuple(each for each in field.metadata if isinstance(each, Needs))
        default = field.get_default(call_default_factory=True)
        yield Row(key, field.annotation, default, field.description or "", Works(), needs)


def table() -> tuple[Row, ...]:
    """All rows: working options, then other plugins' keys."""
    return (*option_rows(), *OTHER_KEYS)


def sections(model: type[BaseModel] = DavinciConfig, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and meaning of each section; the root, whose key is "", comes first."""
    yield key, " ".join((model.__doc__ or "").split())
    for name, field in model.model_fields.items():
        if (inner := section_model(field.annotation)) is not None:
            yield from sections(inner, f"{key}.{name}" if key else name)


def section_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a section; None for a single option."""
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def accepted_names(section: Sequence[str]) -> list[str]:
    """Names accepted in a section of `additional_config`."""
    model: type[BaseModel] = DavinciConfig
    for name in section:
        inner = section_model(model.model_fields[name].annotation)
        assert inner is not None
        model = inner
    others = (row.key.split(".") for row in OTHER_KEYS if isinstance(row.fate, Means | NoEffect))
    return [*model.model_fields, *(path[-1] for path in others if path[:-1] == [*section])]


def json_schema() -> dict[str, Any]:
    """A schema that accepts what the parser accepts, except for relations between keys."""
    schema = DavinciConfig.model_json_schema()
    for row in OTHER_KEYS:
        *path, name = row.key.split(".")
        section = _section_schema(schema, path)
        if isinstance(row.fate, Refused):
            accepted = {"not": {}} if row.default is ... else {"const": row.default}
        else:
            accepted = {**TypeAdapter(row.type).json_schema(), "deprecated": True}
        described = {"description": f"{row.meaning} It {row.fate.told()}."}
        section["properties"][name] = {**accepted, **described}
    return schema


def _section_schema(schema: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    section = schema
    for name in path:
        inner = section.setdefault("properties", {}).setdefault(name, {"type": "object"})
        section = schema["$defs"][inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
    section.setdefault("properties", {})
    return section


def type_name(annotation: Any) -> str:
    """The type in JSON's words: `integer`, `one of "auto", "off"`, `list of integer`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(f'"{x}"' for x in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_name(each) for each in arguments)
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if hasattr(annotation, "__metadata__"):
        return type_name(arguments[0])
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        dict: "object",
        NoneType: "null",
    }
    return names[annotation]
