"""Errors of published figures without each mechanism of the timing model; each step runs once.

Every step is modelled on machines beside its own, of which each lacks one mechanism (`vllm-davinci
dry-run --mechanisms`). A ratio is right in its sign where ours and the published one lie on the
same side of 1. Nothing is fitted. `--page FILE` writes the table as Markdown, `--keep DIRECTORY`
keeps each step, and a later run takes it from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published import deepseek_r1, others, runs
from published.decode import DECODE_GRAPH, PROMPTS_FIRST
from published.deepseek_r1_w8a8 import OVERLAPPED, SERIAL
from published.mechanisms_table import Compared, page_of
from result import Kind, Result, Row
from vllm_davinci.planner.deployments.run import prepared_processes, run_apart

CHIP, TOPOLOGY = "ascend910b2", "two-meshes-of-8"
LIMIT_S = 1800.0
FIRST_MLA = {
    **PROMPTS_FIRST,
    "torchair_graph_config": {"enabled": True, "enable_multistream_mla": True},
    "expert_tensor_parallel_size": 16,
}
# Steps of DeepSeek-R1 by name: the plugin's options, those of the dry-run, and which step is meant.
Taken = Callable[[dict[str, Any]], dict[str, Any]]
R1: dict[str, tuple[Mapping[str, Any], tuple[str, ...], Taken]] = {
    "serial": (runs.SERIAL_ORDER, runs.PREFILL, runs.prefill_of),
    "split": (runs.PUBLISHED, runs.PREFILL, runs.prefill_of),
    "sent": ({**runs.SERIAL_ORDER, **runs.ALL_TO_ALL}, runs.PREFILL, runs.prefill_of),
    "sent-split": ({**runs.PUBLISHED, **runs.ALL_TO_ALL}, runs.PREFILL, runs.prefill_of),
    "decode": (FIRST_MLA, (*runs.DECODE, runs.NO_ASYNC), runs.decode_of),
    "decode-side": (
        {**DECODE_GRAPH, "enable_compiled_operators": False},
        (*runs.DECODE, runs.EXPERT_PARALLEL),
        runs.decode_of,
    ),
}
View = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """
    published: the value measured by others
    steps:     names of R1's steps, passed to `ours` for one machine at a time
    is_ratio:  True if it matters on which side of 1 it lies
    """

    name: str
    published: float
    unit: str
    steps: tuple[str, ...]
    ours: Callable[..., float]
    is_ratio: bool = False


def _rate(view: View) -> float:
    return runs.REQUESTS * runs.PS_PER_SECOND / view["host_ps"]


def _faster(view: View, than: View) -> float:
    return than["host_ps"] / view["host_ps"]


def _ms(view: View) -> float:
    return view["host_ps"] / runs.PS_PER_MS


def _share(view: View) -> float:
    return view["communication_ps"] / view["host_ps"]


FIGURES = (
    Figure("R1, prefill, serial", SERIAL, "requests/s", ("serial",), _rate),
    Figure("R1, prefill, overlap over serial", OVERLAPPED / SERIAL, "x", ("split", "serial"),
           _faster, is_ratio=True),
    Figure("R1, prefill, communication of serial", 0.55, "share", ("serial",), _share),
    Figure("R1, prefill, all-to-alls, serial", runs.SERIAL_ALL_TO_ALL, "requests/s", ("sent",),
           _rate),
    Figure("R1, prefill, all-to-alls, overlap over serial", 1.12, "x", ("sent-split", "sent"),
           _faster, is_ratio=True),
    Figure("R1, decode of 24, the published command", 59.04, "ms", ("decode",), _ms),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", default=[], help="only figures with these parts of names"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="the table as Markdown")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="folder for modelled steps")


def run(args: argparse.Namespace) -> Result:
    with contextlib.ExitStack() as stack:
        kept = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        steps = Steps(kept)
        compared = [each for figure in FIGURES if _is_asked(args, figure.name)
                    if (each := _of_r1(figure, steps)) is not None]  # fmt: skip
        compared += [each for figure in others.FIGURES if _is_asked(args, figure.name)
                     if (each := _of_user(figure, steps)) is not None]  # fmt: skip
    if args.page is not None:
        args.page.write_text(page_of(compared, steps.machine), encoding="utf-8")
    rows = [
        Row(
            each.name, each.unit, each.ours, Kind.MODELLED, baseline=each.published,
            note="; ".join(f"{name} {error:+.0%}" for name, error in each.errors.items()),
        )
        for each in compared
    ]  # fmt: skip
    return Result(
        benchmark="published/mechanisms",
        ours="the timing model",
        baseline="as published",
        rows=rows,
        settings={"figures": steps.machine, "fitted": "nothing"},
        seed=0,
        device="modelled, no NPU",
    )


def _is_asked(args: argparse.Namespace, name: str) -> bool:
    return not args.only or any(part in name for part in args.only)


class Steps:
    """Steps on their machine and without each mechanism; each is modelled once."""

    def __init__(self, kept: Path) -> None:
        self._kept, self._context = kept, prepared_processes()
        self.machine = ""

    def of(self, name: str, options: Callable[[Path], tuple[str, ...]]) -> dict[str, Any] | None:
        """Report of a dry-run. options: of the command, for a model in this directory"""
        report = self._kept / f"{name}.json"
        if not report.is_file():
            with tempfile.TemporaryDirectory(prefix="mechanisms.") as model:
                asked = (*options(Path(model)), "--mechanisms", f"--json={report}")
                log = self._kept / f"{name}.log"
                reason = run_apart(self._context, asked, log, LIMIT_S)
            print(f"{name}: {reason or 'done'}", file=sys.stderr, flush=True)
            if reason is not None:
                return None
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        self.machine = self.machine or found["machine"]["title"]
        return found


def _views(step: dict[str, Any]) -> dict[str, View]:
    """The step on each machine; "" is its own machine."""
    return {"": step["brief"], **step["variants"]}


def _of_r1(figure: Figure, steps: Steps) -> Compared | None:
    found = []
    for name in figure.steps:
        config, options, taken = R1[name]
        report = steps.of(
            f"r1-{name}",
            lambda model, config=config, options=options: (  # type: ignore[misc]
                *deepseek_r1.dry_run_options(model, CHIP, TOPOLOGY, config), *options
            ),
        )  # fmt: skip
        if report is None:
            return None
        found.append(_views(taken(report)))
    values = {machine: figure.ours(*(views[machine] for views in found)) for machine in found[0]}
    return Compared.of(figure.name, figure.unit, figure.published, values, figure.is_ratio)


def _of_user(figure: others.Figure, steps: Steps) -> Compared | None:
    name = figure.name.replace(",", "").replace(" ", "-").lower()
    report = steps.of(name, lambda model: others.dry_run_options(figure, model))
    if report is None:
        return None
    decodes = [step for step in report["steps"] if step["tokens"] == [1] * figure.requests]
    values = {machine: _ms(view) for machine, view in _views(decodes[-1]).items()}
    told = f"{figure.name} ({figure.source})"
    return Compared.of(told, "ms", figure.published, values, is_ratio=False)
