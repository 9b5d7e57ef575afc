"""Writes the page of published figures beside the timing model's, with intervals and errors by
mechanism.

One run models every figure: on the stated machine, over the ranges of assumed figures and of what a
source leaves open, and with each mechanism turned off that figures can turn off. `--keep` stores
the modelled steps for later runs.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from child import run_child
from published import deepseek_r1, others, runs
from published.moe_decodes import RELEASES, Decode, moe_page
from published.page_table import Compared, page_of
from result import Kind, Result, Row
from vllm_davinci.planner.deployments.checkpoint import write_checkpoint
from vllm_davinci.planner.deployments.run import prepared_processes, run_apart
from vllm_davinci.planner.deployments.table import Checkpoint
from vllm_davinci.vnpu.timing.variants import WITHOUT

CHIP, TOPOLOGY = "ascend910b2", "two-meshes-of-8"
# The next chip and its topology, where communication takes a smaller share of a step.
NEXT_CHIP, NEXT_TOPOLOGY = "ascend910c", "supernode"
LIMIT_S = 1800.0

# Published figures: requests per second without and with overlap, by all-gather and all-reduce,
# then by all-to-alls; maximum shares of communication in prefill; milliseconds between tokens.
# Single runs.
SERIAL, OVERLAPPED, OVERLAPPED_ALL_TO_ALL = 2.17, 2.60, 1.01
SHARE, NEXT_SHARE = 0.55, 0.35
INTERVAL_MS = 59.04
# Gain of a decode step with reduce-scatter instead of all-reduce (sharded_pair.py); the source does
# not state layout, requests and machine. The release does so if the ranks divide the tokens.
SHARDED_GAIN = 1.03
SHARDED_LAYOUTS = {"in one mesh": (8, 24), "over both meshes": (16, 32)}
# Goals: gain over the serial step, or share of a bound; negative: share of the time with one
# stream.
GOAL_OVERLAP, GOAL_OF_BOUND, GOAL_BEST = 1.45, 0.85, 1.75
GOAL_ALL_TO_ALL, GOAL_LEAN_ALL_TO_ALL, GOAL_OF_ALL_TO_ALL_BOUND = 1.12, 1.55, 0.97
GOAL_DECODE, GOAL_FUSED_DECODE = -1 / 1.05, -1 / 1.08

# Prompts come first, so that all requests decode together.
PROMPTS_FIRST = {"ascend_scheduler_config": {"enabled": True}}
DECODE_GRAPH = {**PROMPTS_FIRST, "torchair_graph_config": {"enabled": True}}
SIDE_STREAMS = {
    **PROMPTS_FIRST,
    "torchair_graph_config": {
        "enabled": True,
        "enable_multistream_mla": True,
        "enable_multistream_moe": True,
    },
}
COMPOSED = {"enable_compiled_operators": False}
FIRST_MLA = {
    **PROMPTS_FIRST,
    "torchair_graph_config": {"enabled": True, "enable_multistream_mla": True},
    "expert_tensor_parallel_size": 16,
}
View = dict[str, float]
Options = Callable[[Path], tuple[str, ...]]


@dataclass(frozen=True)
class Step:
    """A step of a dry-run. Options are made for a model in a directory; `taken` finds the step."""

    options: Options
    taken: Callable[[dict[str, Any]], dict[str, Any]]


def _r1(
    config: Mapping[str, Any], *options: str, chip: str = CHIP, topology: str = TOPOLOGY
) -> Step:
    is_prefill = options[: len(runs.PREFILL)] == runs.PREFILL

    def of(model: Path) -> tuple[str, ...]:
        return (*deepseek_r1.dry_run_options(model, chip, topology, config), *options)

    return Step(of, runs.prefill_of if is_prefill else runs.decode_of)


def _qwen3(config: Mapping[str, Any]) -> Step:
    """Returns prefills of 4 x 2048 tokens on each of two DP ranks of two chips, by all-to-alls."""

    def of(model: Path) -> tuple[str, ...]:
        write_checkpoint(Checkpoint("qwen3-30b-a3b", "qwen3-30b-a3b", others.ISSUES, {}), model)
        return (
            *(f"--model={model}", "--chip=ascend910b2", "--topology=node-of-8"),
            *("--tensor-parallel-size=2", "--data-parallel-size=2", "--enable-expert-parallel"),
            *("--requests=8", "--concurrency=4", "--prompt-tokens=2048", "--output-tokens=1"),
            f"--max-num-batched-tokens={others.CHUNK}",
            f"--additional-config={json.dumps({**runs.ALL_TO_ALL, **config})}",
        )

    return Step(of, runs.prefill_of)


_ALL_TO_ALL = {**runs.SERIAL_ORDER, **runs.ALL_TO_ALL}
_LEAN = {"overlap": "lean"}
_DECODE = (*runs.DECODE, runs.EXPERT_PARALLEL)
_PREFETCH = {**SIDE_STREAMS, "weight_prefetch_config": {"enabled": True}}


def steps_of_r1(slow: Callable[[], str]) -> dict[str, Step]:
    """Returns steps of DeepSeek-R1 and Qwen3-30B-A3B by name. slow: the topology with fitted
    links
    """
    prefill = runs.PREFILL

    def on_slow(config: Mapping[str, Any]) -> Step:
        return Step(lambda model: _r1(config, *prefill, topology=slow()).options(model),
                    runs.prefill_of)  # fmt: skip

    return {
        "serial": _r1(runs.SERIAL_ORDER, *prefill),
        "sent": _r1(_ALL_TO_ALL, *prefill),
        "split": _r1(runs.PUBLISHED, *prefill),
        "lean": _r1(_LEAN, *prefill),
        "next": _r1(runs.SERIAL_ORDER, *prefill, chip=NEXT_CHIP, topology=NEXT_TOPOLOGY),
        "sent-split": _r1({**runs.PUBLISHED, **runs.ALL_TO_ALL}, *prefill),
        "decode": _r1(FIRST_MLA, *runs.DECODE, runs.NO_ASYNC),
        "decode-whole": _r1({**DECODE_GRAPH, **COMPOSED}, *_DECODE),
        "decode-side": _r1({**SIDE_STREAMS, **COMPOSED}, *_DECODE),
        "decode-fetched": _r1({**_PREFETCH, **COMPOSED}, *_DECODE),
        "decode-fused": _r1(_PREFETCH, *_DECODE),
        "qwen3-serial": _qwen3({"dbo": {"enabled": False}}),
        "qwen3-split": _qwen3({"dbo": {"enabled": True, "split": "token"}}),
        "sent-slow": on_slow(_ALL_TO_ALL),
        "sent-split-slow": on_slow({**runs.PUBLISHED, **runs.ALL_TO_ALL}),
        "lean-slow": on_slow({**_LEAN, **runs.ALL_TO_ALL}),
    }


@dataclass(frozen=True)
class Figure:
    """A published figure or a goal, computed from steps.

    published: None if only a goal is stated
    steps:     names, passed to `ours` for one machine at a time
    """

    name: str
    published: float | None
    unit: str
    steps: tuple[str, ...]
    ours: Callable[..., float]
    is_ratio: bool = False
    goal: float | None = None
    taken: str = ""


def _rate(view: View) -> float:
    return runs.REQUESTS * runs.PS_PER_SECOND / view["host_ps"]


def _faster(view: View, than: View) -> float:
    return than["host_ps"] / view["host_ps"]


def _ms(view: View) -> float:
    return view["host_ps"] / runs.PS_PER_MS


def _share(view: View) -> float:
    return view["communication_ps"] / view["host_ps"]


def _of(bound: str) -> Callable[[View], float]:
    return lambda view: view[bound] / view["host_ps"]


def figures_of_r1() -> tuple[Figure, ...]:
    """Returns published figures and goals of DeepSeek-R1 W8A8 on 16 chips, and of Qwen3-30B-A3B's
    split.
    """
    added_ps = added_by_all_rows()

    def rate_of_all_rows(view: View) -> float:
        return runs.REQUESTS * runs.PS_PER_SECOND / (view["host_ps"] + added_ps)

    overlapped, sent = OVERLAPPED / SERIAL, OVERLAPPED_ALL_TO_ALL / runs.SERIAL_ALL_TO_ALL
    fitted = "links of all-to-alls fitted to the serial rate"
    return (
        Figure("R1, prefill, serial", SERIAL, "requests/s", ("serial",), _rate),
        Figure("the same, with work on all ranks' rows of experts", SERIAL, "requests/s",
               ("serial",), rate_of_all_rows, taken="as public revisions of that time"),
        Figure("R1, prefill, overlap over serial", overlapped, "x", ("split", "serial"), _faster,
               is_ratio=True, goal=GOAL_OVERLAP),
        Figure("R1, prefill, communication of serial", SHARE, "share", ("serial",), _share),
        Figure("R1, prefill, communication of serial, 910C", NEXT_SHARE, "share", ("next",),
               _share),
        Figure("R1, prefill, all-to-alls, serial", runs.SERIAL_ALL_TO_ALL, "requests/s",
               ("sent",), _rate),
        Figure("R1, prefill, all-to-alls, overlap over serial", sent, "x",
               ("sent-split", "sent"), _faster, is_ratio=True),
        Figure("R1, prefill, slow all-to-alls, overlap over serial", sent, "x",
               ("sent-split-slow", "sent-slow"), _faster, is_ratio=True, goal=GOAL_ALL_TO_ALL,
               taken=fitted),
        Figure("Qwen3-30B-A3B, dp2 tp2, prefill, all-to-alls, overlap over serial (2241)", 1.25,
               "x", ("qwen3-split", "qwen3-serial"), _faster, is_ratio=True,
               taken="910B2, four prompts of 2048 per rank"),
        Figure("R1, decode of 24, the published command", INTERVAL_MS, "ms", ("decode",), _ms),
        *(Figure(f"R1, decode, reduce-scatter for all-reduce, {where} (1194)", SHARDED_GAIN, "x",
                 ("decode-side", where), _sharded, is_ratio=True, taken="layout, requests")
          for where in SHARDED_LAYOUTS),
        Figure("R1, prefill, overlap, of its bound", None, "share", ("split",),
               _of("overlap_bound_ps"), goal=GOAL_OF_BOUND),
        Figure("R1, prefill, lean order with overlap over serial", None, "x",
               ("lean", "serial"), _faster, goal=GOAL_BEST),
        Figure("R1, prefill, slow all-to-alls, overlap, of its bound", None, "share",
               ("sent-split-slow",), _of("resource_bound_ps"), goal=GOAL_OF_ALL_TO_ALL_BOUND),
        Figure("R1, prefill, slow all-to-alls, lean order with overlap over serial", None, "x",
               ("lean-slow", "sent-slow"), _faster, goal=GOAL_LEAN_ALL_TO_ALL),
        Figure("R1, decode, weights fetched, over one stream", None, "of the time",
               ("decode-whole", "decode-fetched"), _faster, goal=GOAL_DECODE),
        Figure("R1, decode, weights fetched, compiled operators, over one stream", None,
               "of the time", ("decode-whole", "decode-fused"), _faster, goal=GOAL_FUSED_DECODE),
    )  # fmt: skip


def _sharded(view: View, saved: View) -> float:
    """Returns a step's gain if its exchanges take `saved_ps` less per layer."""
    layers: int = deepseek_r1.MOE_LAYERS
    return view["host_ps"] / (view["host_ps"] - layers * saved["saved_ps"])


def added_by_all_rows() -> int:
    """Returns picoseconds that a step takes longer if each rank processes all ranks' expert
    rows.
    """
    tokens = str(runs.REQUESTS * runs.PROMPT_TOKENS)
    printed = _printed("published.all_rows", tokens, options=("--no-compute", f"--chip={CHIP}"))
    return deepseek_r1.MOE_LAYERS * int(printed)


def saved_by_shards(where: str) -> dict[str, int]:
    """Returns picoseconds saved per layer by exchanging shards, by machine."""
    sizes = map(str, SHARDED_LAYOUTS[where])
    saved: dict[str, int] = json.loads(_printed("published.sharded_pair", CHIP, TOPOLOGY, *sizes))
    return saved


def _printed(program: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """Runs a program of this folder; returns its last output line. options: for `vnpu run`"""
    command = ("-m", "vllm_davinci.vnpu", "run", *options, "--", "python", "-m", program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return run_child([*command, *arguments], LIMIT_S, environment).splitlines()[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", default=[], help="figures whose names contain one of these"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page as Markdown")
    parser.add_argument("--processes", type=int, default=2, help="steps modelled concurrently")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="store modelled steps here")


def run(args: argparse.Namespace) -> Result:
    def is_asked(name: str) -> bool:
        return not args.only or any(part in name for part in args.only)

    with contextlib.ExitStack() as stack:
        kept = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        steps = Steps(kept, args.processes)
        asked = [figure for figure in figures_of_r1() if is_asked(figure.name)]
        users = [figure for figure in others.FIGURES if is_asked(figure.name)]
        steps.model(asked, users)
        compared = [each for each in (*map(steps.of_r1, asked), *map(steps.of_user, users))
                    if each is not None]  # fmt: skip
        moe = moe_page(
            [
                steps.moe_decode(each)
                for each in users
                if "A3B" in each.name and each.source in RELEASES
            ],
            CHIP,
        )
    if args.page is not None:
        stamp = import_module("versions").stamp("core", "vnpu", "planner")
        head = f"# Published figures beside modelled ones\n\n{stamp}\n\n{PREFACE}\n\n"
        tail = f"\n## Decodes of sparse models, and the host\n\n{MOE_PREFACE}\n\n{moe}"
        args.page.write_text(head + page_of(compared, steps.machine) + tail, encoding="utf-8")
    rows = [
        Row(
            each.name, each.unit, each.ours, Kind.MODELLED,
            interval=each.interval, note=each.taken, at_least=each.at_least, at_most=each.at_most,
        )
        for each in compared
    ]  # fmt: skip
    return Result(
        ours="the timing model",
        baseline="",
        rows=rows,
        settings={"figures": steps.machine, "fitted": "links of slow all-to-alls"},
        device="modelled, no NPU",
    )


PREFACE = """\
Made by `nox -s bench -- published/page --page docs/measurements/published.md`, all rows in one run; nothing is patched
into it later. Ours are modelled; published figures were measured by others, on other releases, and numbers in brackets
are issues or pull requests of [vllm-project/vllm-ascend](https://github.com/vllm-project/vllm-ascend/issues). Nothing
is fitted, except in rows that say so. Intervals cover the ranges of assumed figures ([How sure is
that?](../guides/model_time.md#how-sure-is-that)) and what a source leaves open. A figure is within limits if it differs
by at most 20 %, a ratio by at most 0.05 (published below 1.15) or 0.10, or if the interval contains the published figure. The sign of a ratio is
right if the whole interval lies on the published side of 1. [What the rows say](mechanisms.md) explains them, and says
what is not known."""  # noqa: E501
MOE_PREFACE = """\
The host's time is the number of calls per layer in the measured releases' sources, multiplied by the modelled time of a
call. A step takes the longer of host and device, plus vLLM's own Python."""  # noqa: E501


class Steps:
    """Models steps, each once: on their machine, on its variants, and without each mechanism."""

    def __init__(self, kept: Path, processes: int) -> None:
        self._kept, self._processes, self._context = kept, processes, prepared_processes()
        self.machine = ""
        self._of_r1 = steps_of_r1(self._slow_topology)

    def model(self, figures: list[Figure], users: list[others.Figure]) -> None:
        """Models all steps of these figures, several at a time."""
        needed = {name for figure in figures for name in figure.steps if name in self._of_r1}
        if any(name.endswith("-slow") for name in needed):
            needed |= {"serial", "sent"}
        first = [name for name in self._of_r1 if name in needed]
        last = [name for name in first if name.endswith("-slow")]
        work: list[Callable[[], object]] = [
            partial(self.report, f"r1-{name}", self._of_r1[name].options)
            for name in first
            if name not in last
        ]
        for user in users:
            for number, each in enumerate(user.possible()):
                work.append(partial(self._report_of, each, number))
        with ThreadPoolExecutor(self._processes) as pool:
            list(pool.map(lambda task: task(), work))
            list(pool.map(lambda name: self._report(name), last))

    def report(self, name: str, options: Options) -> dict[str, Any] | None:
        """Returns the report of a dry-run, or None if it failed. options: for a model in this
        directory
        """
        report = self._kept / f"{name}.json"
        if not report.is_file():
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="published.") as model:
                asked = (*options(Path(model)), "--sensitivity", "--mechanisms")
                reason = run_apart(
                    self._context, (*asked, f"--json={report}"), self._kept / f"{name}.log", LIMIT_S
                )
            print(f"{name}: {reason or 'done'}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
            if reason is not None:
                return None
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found

    def _report(self, name: str) -> dict[str, Any] | None:
        return self.report(f"r1-{name}", self._of_r1[name].options)

    def _report_of(self, figure: others.Figure, number: int) -> dict[str, Any] | None:
        name = figure.name.replace(",", "").replace(" ", "-").lower()
        options = partial(others.dry_run_options, figure)
        return self.report(f"{name}-{number}" if number else name, options)

    def _slow_topology(self) -> str:
        sent, serial = (self._view(name) for name in ("sent", "serial"))
        assert sent is not None and serial is not None
        file = self._kept / f"{TOPOLOGY}.toml"
        runs.write_slow_topology(file, runs.slower_all_to_alls(sent[""], serial[""]))
        return str(file)

    def _view(self, name: str) -> dict[str, View] | None:
        """Returns a step's times by machine; "" is its own machine."""
        if name in SHARDED_LAYOUTS:
            return self._saved(name)
        report = self._report(name)
        if report is None:
            return None
        self.machine = self.machine or report["machine"]["title"]
        return _views(self._of_r1[name].taken(report))

    def _saved(self, where: str) -> dict[str, View]:
        file = self._kept / f"saved {where}.json"
        if not file.is_file():
            file.write_text(json.dumps(saved_by_shards(where)), encoding="utf-8")
        saved = json.loads(file.read_text(encoding="utf-8"))
        return {machine: {"saved_ps": ps} for machine, ps in saved.items()}

    def of_r1(self, figure: Figure) -> Compared | None:
        """Compares a published figure with ours; None if a step failed."""
        views = [self._view(name) for name in figure.steps]
        known = [view for view in views if view is not None]
        if len(known) < len(views):
            return None
        machines = [machine for machine in known[0] if all(machine in view for view in known)]
        values = {machine: figure.ours(*(view[machine] for view in known)) for machine in machines}
        return Compared(
            figure.name, figure.unit, figure.published, values, _ends(values),
            figure.is_ratio, figure.goal, figure.taken,
        )  # fmt: skip

    def of_user(self, figure: others.Figure) -> Compared | None:
        """Compares a user's step with ours; None if a step failed."""
        found = [
            {machine: _ms(view) for machine, view in _views(step).items()}
            for step in self._user_steps(figure)
        ]
        if not found:
            return None
        ends = [end for values in found for end in _ends(values)]
        held = "held" if figure.is_held else "seen before"
        return Compared(
            f"{figure.name} ({figure.source})", "ms", figure.published, found[0],
            (min(ends), max(ends)), taken=f"{held}; {figure.taken}",
        )  # fmt: skip

    def moe_decode(self, figure: others.Figure) -> Decode:
        """Returns a user's row for the table of sparse models' decode steps."""
        [step, *_] = self._user_steps(figure)
        modelled = step["modelled"]
        return Decode(figure.name, figure.source, figure.published, figure.requests,
                      modelled["host_ps"], modelled["any_ps"])  # fmt: skip

    def _user_steps(self, figure: others.Figure) -> Iterator[dict[str, Any]]:
        for number, each in enumerate(figure.possible()):
            report = self._report_of(each, number)
            if report is not None:
                yield [s for s in report["steps"] if s["tokens"] == [1] * each.requests][-1]


def _views(step: dict[str, Any]) -> dict[str, View]:
    return {"": step["brief"], **step["variants"]}


def _ends(values: Mapping[str, float]) -> tuple[float, float]:
    inside = [value for machine, value in values.items() if not machine.startswith(WITHOUT)]
    return min(inside), max(inside)
