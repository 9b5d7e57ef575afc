"""Dry-runs deployments, each in a process of its own, and collects the outcomes."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from vllm_davinci.planner.deployments.table import Deployment
from vllm_davinci.planner.devices import MOST_DEVICES
from vllm_davinci.planner.time_limit import time_limit

_PREFIX = "vllm-davinci dry-run: "
_MOST_CHARACTERS = 400
_FEWEST_TOKENS = 256  # per step, whatever its limits
_MEMORY = ("weight", "activation", "other", "graph", "piece", "cache")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a deployment's dry-run; every time is modelled.

    reason:         why it did not start or finish, in one line; None on success
    ranks:          number of the engine's ranks
    used_bytes:     planned memory of a device, out of memory_bytes
    cache_tokens:   capacity of one data-parallel rank's KV cache
    profiled_bytes: peak of vLLM's profile run, a whole step without attention
    whole_bytes, split_bytes: peak of a step without weights and cache, whole and in ubatches; 0 if
                    no step is split
    first_token_ms: time until every request has its first token
    token_ms:       time of a decode step
    ..._bound_ms:   the same with perfect overlap
    """

    name: str
    reason: str | None = None
    ranks: int = 0
    used_bytes: int = 0
    memory_bytes: int = 0
    cache_tokens: int = 0
    profiled_bytes: int = 0
    whole_bytes: int = 0
    split_bytes: int = 0
    first_token_ms: float = 0.0
    first_token_bound_ms: float = 0.0
    token_ms: float = 0.0
    token_bound_ms: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_expected(self, row: Deployment) -> bool:
        """True if it started, or failed for the reason that the row states."""
        if self.reason is None or not row.refused:
            return self.reason is None and not row.refused
        return row.refused in self.reason


def run_all(
    rows: Iterable[Deployment],
    directory: Path,
    resume: bool = False,
    limit_s: float | None = None,
    also: Sequence[str] = (),
) -> Iterator[Outcome]:
    """Dry-runs rows in turn. Reports, logs and outcomes go into the directory.

    resume:  skips rows whose outcome is in the directory
    limit_s: time limit per row; None: from its steps
    also:    further options of each dry-run
    """
    directory.mkdir(parents=True, exist_ok=True)
    context = prepared_processes()
    for row in rows:
        path = directory / f"{row.name}.outcome.json"
        if resume and path.is_file():
            yield Outcome(**json.loads(path.read_text(encoding="utf-8")))
            continue
        outcome = _run(row, directory, context, limit_s or time_limit(_steps(row)), also)
        path.write_text(json.dumps(outcome.to_json(), indent=1) + "\n", encoding="utf-8")
        yield outcome


def prepared_processes() -> ForkServerContext:
    """Fork server that has imported what a dry-run needs."""
    from vllm_davinci.vnpu import VirtualDeviceConfig

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_davinci.planner.dry_run.preload"])
    # Under `vnpu run` the server's virtual NPU is active, with its environment's devices, before
    # it preloads.
    before = dict(os.environ)
    os.environ.update(VirtualDeviceConfig(devices=MOST_DEVICES, compute=False).environment())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _steps(row: Deployment) -> int:
    """Maximum number of steps for the row's requests, with prompts in chunks."""
    return row.requests * (-(-row.prompt_tokens // _FEWEST_TOKENS) + row.output_tokens)


def _run(
    row: Deployment,
    directory: Path,
    context: ForkServerContext,
    limit_s: float,
    also: Sequence[str],
) -> Outcome:
    report, log = (directory / f"{row.name}.{kind}" for kind in ("report.json", "log"))
    report.unlink(missing_ok=True)
    options = (f"--deployment={row.name}", f"--json={report}", *also)
    reason = run_apart(context, options, log, limit_s)
    if reason is not None or not report.is_file():
        return Outcome(row.name, reason or "there is no report")
    return outcome_of(row.name, json.loads(report.read_text(encoding="utf-8")))


def run_apart(
    context: ForkServerContext, options: Sequence[str], log: Path, limit_s: float
) -> str | None:
    """Runs a dry-run in a process of its own. Returns why it failed, or None.

    options: of `vllm-davinci dry-run`
    log:     file for its output
    """
    process = context.Process(target=_dry_run, args=(tuple(options), log))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        return f"the dry-run took more than {limit_s:.0f} s"
    if process.exitcode == 0:
        return None
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return reason_of(said) or f"exit status {process.exitcode}"


def _dry_run(options: tuple[str, ...], log: Path) -> None:
    """Runs the command in the child process and redirects its output to the log."""
    with log.open("w", encoding="utf-8") as output:
        for standard in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), standard.fileno())
    sys.argv = ["vllm-davinci", "dry-run", *options]
    runpy.run_module("vllm_davinci.meta", run_name="__main__")


def reason_of(log: str) -> str:
    """The command's own last message, or else the log's last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    own = [line for line in own if " nothing here: " not in line]
    said = (own or lines or [""])[-1]
    return said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS]}..."


def outcome_of(name: str, report: dict[str, Any]) -> Outcome:
    """Reads the outcome from a report of `dry-run --json`."""
    memory, steps = report["memory"], report["steps"]
    most = report["decode_tokens"]
    has_prompt = [any(tokens > most for tokens in step["tokens"]) for step in steps]
    last = max((at for at, is_prompt in enumerate(has_prompt) if is_prompt), default=-1)
    first, later = steps[: last + 1], steps[last + 1 :]

    largest = {form: [0] for form in ("whole", "split")}
    for kind, size in memory["largest_steps"].items():
        largest["whole" if kind.endswith("whole") else "split"].append(size)

    def ms(chosen: list[dict[str, Any]], take: Any, total: Any) -> float:
        return total(take(step) for step in chosen) / 10**9 if chosen else 0.0

    def taken(step: dict[str, Any]) -> int:
        return int(step["modelled"]["host_ps"])

    def bound(step: dict[str, Any]) -> int:
        return int(step["overlap_bound_ps"])

    return Outcome(
        name,
        ranks=report["world_size"],
        used_bytes=sum(memory[f"{part}_bytes"] for part in _MEMORY),
        memory_bytes=memory["total_bytes"],
        cache_tokens=memory["cache_tokens"],
        profiled_bytes=memory["profiled_bytes"],
        whole_bytes=max(largest["whole"]),
        split_bytes=max(largest["split"]),
        first_token_ms=ms(first, taken, sum),
        first_token_bound_ms=ms(first, bound, sum),
        token_ms=ms(later, taken, statistics.median),
        token_bound_ms=ms(later, bound, statistics.median),
    )
