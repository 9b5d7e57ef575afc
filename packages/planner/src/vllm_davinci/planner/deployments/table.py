"""Reads `table/*.toml`: checkpoints, and how they are deployed."""

from __future__ import annotations

import difflib
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from vllm_davinci.planner.errors import DeploymentError

_FOLDER = Path(__file__).parent
Role = Literal["mixed", "prefill", "decode"]


@dataclass(frozen=True)
class Checkpoint:
    """
    config:       name of the model's configuration in `models/`
    source:       who publishes it
    quantization: pattern of layer names -> type in ModelSlim's description; the first match counts,
                  layers without one are FLOAT. Empty: the checkpoint has no description
    """

    name: str
    config: str
    source: str
    quantization: Mapping[str, str] = field(default_factory=dict)

    def configuration(self) -> dict[str, Any]:
        """The model's config.json."""
        path = _FOLDER / "models" / f"{self.config}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


@dataclass(frozen=True)
class Deployment:
    """An engine with one or several data-parallel ranks.

    role:          prefill and decode; only one of the two in a disaggregated deployment
    chip:          chip of each rank; `vnpu machines` lists them
    topology:      links between the chips
    hosts:         number of servers of the engine
    source:        where it is published
    options:       options of `vllm serve`, after the model
    environment:   environment variables of its processes
    left_out:      published options that a dry-run cannot follow or this plugin lacks
    requests:      per data-parallel rank in a dry-run, all at once
    prompt_tokens: per request
    output_tokens: per request
    refused:       part of the reason why this release does not start it; empty if it starts
    """

    name: str
    checkpoint: Checkpoint
    role: Role
    chip: str
    topology: str
    hosts: int
    source: str
    options: str
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    requests: int = 4
    prompt_tokens: int = 1024
    output_tokens: int = 4
    refused: str = ""

    def arguments(self) -> list[str]:
        """The options, split as a shell does."""
        return shlex.split(self.options)


_Row = TypeVar("_Row", Checkpoint, Deployment)


@cache
def all_deployments() -> Mapping[str, Deployment]:
    """Every row, by name. Raises DeploymentError for an invalid file."""
    tables = {
        path.name: tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted((_FOLDER / "table").glob("*.toml"))
    }
    checkpoints = {
        name: _filled(Checkpoint, f"{file}: checkpoint {name}", {"name": name, **entries})
        for file, table in tables.items()
        for name, entries in table.get("checkpoints", {}).items()
    }
    found: dict[str, Deployment] = {}
    for file, table in tables.items():
        for name, entries in table.get("deployments", {}).items():
            where = f"{file}: deployment {name}"
            if name in found:
                raise DeploymentError(f"{where} exists twice. Rename one.")
            checkpoint = checkpoints.get(entries.get("checkpoint"))
            if checkpoint is None:
                raise DeploymentError(
                    f"{where} is of checkpoint {entries.get('checkpoint')!r}, which is in no file. "
                    f"Known: {', '.join(checkpoints)}."
                )
            row = {"name": name, **entries, "checkpoint": checkpoint}
            row["left_out"] = tuple(entries.get("left_out", ()))
            found[name] = _filled(Deployment, where, row)
            if found[name].role not in get_args(Role):
                raise DeploymentError(f"{where}: role is one of {', '.join(get_args(Role))}.")
    return found


def deployment(name: str) -> Deployment:
    """The row of that name. Raises DeploymentError with the nearest name."""
    known = all_deployments()
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
    raise DeploymentError(
        f"there is no deployment {name!r}. Did you mean {nearest!r}? `vllm-davinci deployments` "
        "lists them."
    )


def _filled(cls: type[_Row], where: str, entries: Mapping[str, Any]) -> _Row:
    known: dict[str, bool] = {
        each.name: each.default is MISSING and each.default_factory is MISSING
        for each in fields(cls)
    }
    odd = [name for name in entries if name not in known]
    missing = [name for name, is_needed in known.items() if is_needed and name not in entries]
    if odd or missing:
        raise DeploymentError(
            f"{where} has {odd or 'nothing'} that is not known and lacks {missing or 'nothing'}. "
            f"Known: {', '.join(known)}."
        )
    return cls(**entries)
