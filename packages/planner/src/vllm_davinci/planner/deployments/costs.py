"""Writes step-time tables (`step_costs`) for deployments."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from vllm_davinci.planner.deployments.run import prepared_processes, run_apart
from vllm_davinci.planner.deployments.table import Deployment
from vllm_davinci.planner.step_costs.provider import STEPS, file_name, is_current
from vllm_davinci.planner.time_limit import time_limit

# An engine that may split any step needs windows of fused launches and activations for both
# ubatches. If they do not fit, the row is retried with these lower values of
# --gpu-memory-utilization.
_LESS_MEMORY = (0.87, 0.84, 0.8, 0.7)
# Out-of-memory messages of vLLM, torch and torch_npu's log.
_NO_ROOM = ("Free memory on device", "torch.OutOfMemoryError", "PTA memory error")
_ONE_RANK = "one rank has nothing to decide"
# Step times within this relative difference count as equal: the engine of a sample has less memory,
# so that its addresses differ, and slightly also the share of its operands in L2.
_EQUAL = 1e-5
# Without any of these options of `vllm serve` an engine has one rank.
_RANKS = {
    *("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp"),
    *("--pipeline-parallel-size", "-pp"),
}


def write_costs(
    rows: Iterable[Deployment], directory: Path, resume: bool = False, limit_s: float | None = None
) -> Iterator[tuple[str, Path | None, str]]:
    """Models rows in turn. Yields the row's name and its file, or None and the reason.

    Rows of one engine share a file, made for the first. Rows that do not start are left out.
    resume:  skips rows whose file is from the installed timing model
    limit_s: time limit per dry-run; None: from its steps
    """
    directory.mkdir(parents=True, exist_ok=True)
    made: set[Path] = set()
    context = prepared_processes()
    for row in rows:
        if row.refused:
            continue
        known = _file_of(row.name, directory) if resume else None
        if known is not None:
            made.add(known)  # later rows of the same engine share it
            yield row.name, known, ""
            continue
        if not any(option.partition("=")[0] in _RANKS for option in row.arguments()):
            yield row.name, None, _ONE_RANK
            continue
        content, reason = _modelled(row.name, context, limit_s or time_limit(STEPS))
        if content is None or content["world_size"] == 1:
            yield row.name, None, reason or _ONE_RANK
            continue
        file = directory / file_name(content["engine"])
        if file not in made:
            content["model"] = content["deployment"] = row.name
            _write(file, content)
            made.add(file)
        yield row.name, file, ""


def stamp_costs(
    rows: Iterable[Deployment], directory: Path, limit_s: float | None = None
) -> Iterator[tuple[str, Path | None, str]]:
    """Models a sample of the steps of each stale table, and stamps the table with the installed
    timing model if all times are equal. Yields the row's name and its file, or None and the reason.

    The sample: prefill steps of the smallest size by each dispatch method, and all decode steps.
    """
    context = prepared_processes()
    files = {json.loads(file.read_text(encoding="utf-8"))["deployment"]: file
             for file in sorted(directory.glob("*.json"))}  # fmt: skip
    for row in rows:
        file = files.get(row.name)
        if file is None or is_current(file):
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        size = content["steps"][0]["tokens"]
        asked = (f"--prompt-tokens={size}",)
        found, reason = _modelled(row.name, context, limit_s or time_limit(STEPS), asked)
        if found is None:
            yield row.name, None, reason
        elif changed := _changed(content, found):
            yield row.name, None, f"its steps take other times, make it again: {changed}"
        else:
            content |= {name: found[name] for name in ("machine", "figures")}
            _write(file, content)
            yield row.name, file, ""


def _changed(table: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
    """Describes the sample's first step whose times differ from the table's; "" if none differs."""
    if table["engine"] != sample["engine"]:
        return f"it is for {table['engine']}, the row's engine is {sample['engine']}"
    whole = {step["tokens"]: step["by_method"]["whole"] for step in table["steps"]}
    found = {step["tokens"]: step["by_method"]["whole"] for step in sample["steps"]}
    decodes, again = ({step["tokens"]: step["by_method"] for step in each["decodes"]}
                      for each in (table, sample))  # fmt: skip
    for kind, old, new in (("prefill", whole, found), ("decode", decodes, again)):
        for tokens, times in new.items():
            known = old.get(tokens, {})
            if known.keys() != times.keys() or any(
                not math.isclose(times[name], known[name], rel_tol=_EQUAL) for name in times
            ):
                return f"{kind} of {tokens} tokens: {old.get(tokens)} ps, now {times} ps"
    return ""


def _write(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, separators=(",", ":"))
    file.write_text(f"{text}\n", encoding="utf-8")


def _file_of(name: str, directory: Path) -> Path | None:
    for file in sorted(directory.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("deployment") == name and is_current(file):
            return file
    return None


def _modelled(
    name: str, context: ForkServerContext, limit_s: float, asked: tuple[str, ...] = ()
) -> tuple[dict[str, Any] | None, str]:
    """The content of the row's file, or None and the reason."""
    with tempfile.TemporaryDirectory(prefix="vllm-davinci-step-costs.") as directory:
        file, log = (Path(directory) / each for each in ("costs.json", "log"))
        options = (f"--deployment={name}", f"--step-costs={file}", *asked)
        reason = run_apart(context, options, log, limit_s)
        for share in _LESS_MEMORY:
            if reason is None or not any(words in reason for words in _NO_ROOM):
                break
            less = f"--gpu-memory-utilization={share}"
            reason = run_apart(context, (*options, less), log, limit_s)
        if reason is not None:
            return None, reason
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content, ""
