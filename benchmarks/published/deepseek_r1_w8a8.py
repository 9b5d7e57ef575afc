"""Compares published steps of DeepSeek-R1 W8A8 on 16 chips with the timing model.

Prefill of 4 x 4096 tokens in the published order of work (attention, shared and routed experts are
each summed over the ranks with an all-reduce), with and without dual-batch overlap, in the lean
order, and with experts' tokens in all-to-alls; decode of 24 requests from graphs; steps of many
sizes, split where their costs say so; what modelling costs this host. Each row has its interval
over the ranges of assumed figures, and goals count where they hold over all of it, with the options
that users get by default. Ours is modelled; the
published figures are measured, by others, on another release of another plugin, and their exact
machine and revision are not known: notes have them beside ours, with the error. Nothing is fitted
but one factor: how much of the links an all-to-all reaches, on the published serial rate with
all-to-alls.

`--rows` runs some of it; each takes dry-runs of its own, of half a minute each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from child import run_child
from published.decode import decode_rows
from published.deepseek_r1 import CONFIG, DENSE_LAYERS
from published.figures import (
    beside,
    bound,
    communication_share,
    host_ps,
    modelled,
    rate,
    rate_of,
    ratio_of,
    share_of_bound,
    share_of_resources,
)
from published.intervals import interval
from published.runs import (
    ALL_TO_ALL,
    PROMPT_TOKENS,
    PS_PER_SECOND,
    PUBLISHED,
    REQUESTS,
    SERIAL_ALL_TO_ALL,
    SERIAL_ORDER,
    Runs,
)
from published.split_regret import regret_rows
from result import Kind, Result, Row

GIB = 2**30
# Published requests per second, without and with overlap: all-gather and all-reduce, then
# all-to-all; maximum share of communication in prefill. Single runs.
SERIAL, OVERLAPPED = 2.17, 2.60
OVERLAPPED_ALL_TO_ALL = 1.01
SHARE = 0.55
# The next chip and its links, with less communication.
NEXT_CHIP, NEXT_TOPOLOGY, NEXT_SHARE = "ascend910c", "supernode", 0.35
# Our goals: relative to the serial rate, and to the bound.
GOAL_OVERLAP, GOAL_OF_BOUND, GOAL_BEST = 1.45, 0.85, 1.75
GOAL_ALL_TO_ALL, GOAL_LEAN_ALL_TO_ALL, GOAL_OF_ALL_TO_ALL_BOUND = 1.12, 1.55, 0.97
GOAL_STEP_S, GOAL_TIMELINE_S, GOAL_START_S, GOAL_MEMORY_GIB = 0.2, 1.0, 25.0, 1.5

# The shipped step-time table decides how steps of each size are cut, and how many vector cores
# their norms use: the last ubatch's attention takes longer than the first one's reduction, which
# covers it, and norms on few cores leave memory bandwidth to concurrent reductions.
EVEN = {**PUBLISHED, "dbo": {"split": "token"}, "step_costs": None}


def prefill_rows(runs: Runs) -> list[Row]:
    serial, split = runs.prefill(SERIAL_ORDER), runs.prefill(PUBLISHED)
    even = runs.prefill(EVEN)
    best = runs.prefill({"overlap": "lean"})
    added_ps = (CONFIG["num_hidden_layers"] - DENSE_LAYERS) * int(
        run_child(
            [
                *("-m", "vllm_davinci.vnpu", "run", "--no-compute", f"--chip={runs.chip}", "--"),
                *("python", "-m", "published.all_rows", str(REQUESTS * PROMPT_TOKENS)),
            ],
            600.0,
            {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        ).split()[-1]
    )
    whole_ps = serial["modelled"]["host_ps"] + added_ps
    all_rows = REQUESTS * PS_PER_SECOND / whole_ps
    communication_ps = serial["modelled"]["communication_ps"]
    share, share_all_rows = (
        communication_ps / ps for ps in (serial["modelled"]["host_ps"], whole_ps)
    )
    ratio = rate(split) / rate(serial)
    return [
        modelled(
            "prefill, published order, serial", "requests/s", rate(serial),
            interval=interval(rate_of, serial),
            note=beside(rate(serial), SERIAL),
        ),
        modelled(
            "the same, with work on all ranks' rows of experts", "requests/s", all_rows,
            note=beside(all_rows, SERIAL) + "; what public revisions of that time launch",
        ),
        modelled(
            "prefill, published order, dual-batch overlap", "requests/s", rate(split),
            baseline=rate(serial), bound=bound(split), at_least=GOAL_OVERLAP,
            interval=interval(ratio_of, split, serial),
            note=beside(rate(split), OVERLAPPED)
            + f"; ratio {ratio:.3f}, published {OVERLAPPED / SERIAL:.3f}; "
            f"{rate(even) / rate(serial):.3f} with ubatches of equal size and norms on all cores",
        ),
        modelled(
            "of the bound of overlap", "share", rate(split) / bound(split), at_least=GOAL_OF_BOUND,
            interval=interval(share_of_bound, split),
        ),
        modelled(
            "prefill, lean order with overlap", "requests/s", rate(best), baseline=rate(serial),
            bound=bound(best), at_least=GOAL_BEST, interval=interval(ratio_of, best, serial),
            note="one reduction of experts, reduce-scatter and all-gather, shards",
        ),
        modelled(
            "communication in serial prefill", "share", share, at_most=SHARE,
            interval=interval(communication_share, serial),
            note=beside(share, SHARE) + ", published as the most that was seen; "
            f"{share_all_rows:.3f} with work on all ranks' rows",
        ),
    ]  # fmt: skip


def next_chip_rows(runs: Runs) -> list[Row]:
    """The serial step on the next chip, which has faster links."""
    machine = argparse.Namespace(chip=NEXT_CHIP, topology=NEXT_TOPOLOGY, routing=runs.routing)
    newer = Runs(machine, runs.directory)
    serial = newer.prefill(SERIAL_ORDER)
    runs.machine = runs.machine or newer.machine
    share = serial["modelled"]["communication_ps"] / serial["modelled"]["host_ps"]
    return [
        modelled(
            f"communication in serial prefill, {NEXT_CHIP}", "share", share, at_most=NEXT_SHARE,
            interval=interval(communication_share, serial),
            note=beside(share, NEXT_SHARE) + ", published as the most that was seen",
        ),
    ]  # fmt: skip


def all_to_all_rows(runs: Runs) -> list[Row]:
    """All-to-alls and all-reduces belong to two groups and overlap in a split step. Their sum is
    therefore no bound; the busiest resource's work is.
    """
    sent = runs.prefill({**SERIAL_ORDER, **ALL_TO_ALL})
    serial = runs.prefill({**SERIAL_ORDER, **ALL_TO_ALL}, slow=True)
    split = runs.prefill({**PUBLISHED, **ALL_TO_ALL}, slow=True)
    lean = runs.prefill({"overlap": "lean", **ALL_TO_ALL}, slow=True)
    sound = runs.prefill({"overlap": "lean", **ALL_TO_ALL})
    ratio = rate(split) / rate(serial)
    least_ps = split["brief"]["resource_bound_ps"]
    return [
        modelled(
            "prefill, all-to-all, serial, unfitted", "requests/s", rate(sent),
            interval=interval(rate_of, sent), note=beside(rate(sent), SERIAL_ALL_TO_ALL),
        ),
        modelled(
            "prefill, all-to-all, dual-batch overlap", "requests/s", rate(split),
            baseline=rate(serial), at_least=GOAL_ALL_TO_ALL,
            bound=REQUESTS * PS_PER_SECOND / least_ps,
            interval=interval(ratio_of, split, serial),
            note=f"all-to-alls {runs.slower:.2f} times as long, fitted on the published serial "
            f"rate of {SERIAL_ALL_TO_ALL} ({rate(serial):.3f} here); "
            + beside(rate(split), OVERLAPPED_ALL_TO_ALL)
            + f"; ratio {ratio:.3f}, published {OVERLAPPED_ALL_TO_ALL / SERIAL_ALL_TO_ALL:.3f}",
        ),
        modelled(
            "prefill, all-to-all, lean order with overlap", "requests/s", rate(lean),
            baseline=rate(serial), at_least=GOAL_LEAN_ALL_TO_ALL,
            interval=interval(ratio_of, lean, serial),
            note="on the same links; rows to the experts as int8",
        ),
        modelled(
            "the same, unfitted", "requests/s", rate(sound), baseline=rate(sent),
            interval=interval(ratio_of, sound, sent),
        ),
        modelled(
            "all-to-all with overlap, of its bound", "share", least_ps / host_ps(split),
            at_least=GOAL_OF_ALL_TO_ALL_BOUND, interval=interval(share_of_resources, split),
            note="the busiest resource's work, or computing, which nothing can shorten",
        ),
    ]  # fmt: skip


def cost_rows(runs: Runs) -> list[Row]:
    """Rows on the time that this host needs to model a prefill."""
    trace = runs.directory / "timeline.json"
    plain, host = runs.prefill(SERIAL_ORDER, is_plain=True), runs.newest_host
    traced = runs.prefill(SERIAL_ORDER, f"--trace={trace}", is_plain=True)
    figures = {
        "step of a prefill": ("s", plain["wall_seconds"], GOAL_STEP_S),
        "step of a prefill, with its timeline": ("s", traced["wall_seconds"], GOAL_TIMELINE_S),
        "start of the engine": ("s", host["start_seconds"], GOAL_START_S),
        "memory": ("GiB", host["peak_rss_bytes"] / GIB, GOAL_MEMORY_GIB),
    }
    return [
        Row(f"cost of modelling: {name}", unit, ours, Kind.MEASURED, at_most=goal)
        for name, (unit, ours, goal) in figures.items()
    ]


ROWS: dict[str, Callable[[Runs], list[Row]]] = {
    "prefill": prefill_rows,
    "next_chip": next_chip_rows,
    "all_to_all": all_to_all_rows,
    "decode": decode_rows,
    "regret": regret_rows,
    "cost": cost_rows,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", default="ascend910b2", help="chip of `vnpu machines`")
    parser.add_argument("--topology", default="two-meshes-of-8")
    parser.add_argument(
        "--routing", default="balanced", help="rows of the busiest expert rank over the mean"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all of them"
    )


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(prefix="published.") as directory:
        runs = Runs(args, Path(directory))
        rows = [row for name in args.rows for row in ROWS[name](runs)]
    return Result(
        benchmark="published/deepseek_r1_w8a8",
        ours="dual-batch overlap, on the modelled clock with contention",
        baseline="the published order of work in one piece, on the same machine",
        rows=rows,
        settings={
            "chip": args.chip,
            "topology": args.topology,
            "routing": args.routing,
            "rows": " ".join(args.rows),
            "figures": runs.machine["hash"],
            "assumed figures": len(runs.machine["assumptions"]),
            "fitted": "nothing"
            if runs.slower is None
            else f"all_to_all_share / {runs.slower:.2f}, in the rows of all-to-all with overlap",
        },
        seed=0,
        device=f"modelled, no NPU: {runs.machine['title']}",
        bounded_by="the longer of computing and communicating, each undisturbed",
    )
