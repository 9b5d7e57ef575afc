"""Published steps of DeepSeek-R1 W8A8 on 16 chips, beside the timing model of the same machine.

Prefill of 4 x 4096 tokens in the published order of work (attention, shared and routed experts are
each summed over the ranks with an all-reduce), with and without dual-batch overlap, in the lean
order, and with experts' tokens in all-to-alls; decode of 24 requests. Ours is modelled; the
published figures are measured, by others, on another release of another plugin, and their exact
machine and revision are not known: notes have them beside ours, with the error. Nothing is fitted
but one factor: how much of the links an all-to-all reaches, on the published serial rate with
all-to-alls.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from published.deepseek_r1 import dry_run
from result import Kind, Result, Row
from vllm_davinci.vnpu import timing

PS_PER_SECOND = 10**12
REQUESTS = 4
# Requests per second, without and with overlap: all-gather and all-reduce, then all-to-all; ms
# between tokens; share of communication in prefill, at most. Single runs.
SERIAL, OVERLAPPED = 2.17, 2.60
SERIAL_ALL_TO_ALL, OVERLAPPED_ALL_TO_ALL = 0.90, 1.01
INTERVAL_MS = 59.88
SHARE = 0.55
# What ours is to reach: of the serial rate; of the bound.
GOAL_OVERLAP, GOAL_OF_BOUND, GOAL_BEST, GOAL_ALL_TO_ALL = 1.45, 0.85, 1.75, 1.12
NEVER = {"min_total_tokens_to_split": 1 << 30}
PUBLISHED = {"overlap": "published"}
ALL_TO_ALL = {**PUBLISHED, "moe_communication": "all_to_all"}
DECODE_STEP = [1] * 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", default="ascend910b2", help="see `vnpu machines`")
    parser.add_argument("--topology", default="two-meshes-of-8")
    parser.add_argument(
        "--routing", default="balanced", help="rows of the busiest expert rank over the mean"
    )


def run(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory(prefix="topology.") as directory:
        return _run(args, Path(directory) / f"{args.topology}.toml")


def _run(args: argparse.Namespace, slow: Path) -> Result:
    def prefill(config: dict[str, Any], topology: str = args.topology) -> dict[str, Any]:
        work = ("--requests=4", "--prompt-tokens=4096", "--output-tokens=1", "--enforce-eager")
        return dry_run(args.chip, topology, *work, f"--routing={args.routing}", config=config)

    serial = prefill({**PUBLISHED, "dbo": NEVER})
    first = step_of(serial)
    second = step_of(prefill(PUBLISHED))
    best = step_of(prefill({"overlap": "lean"}))
    sent = step_of(prefill({**ALL_TO_ALL, "dbo": NEVER}))
    fitted = slower_all_to_all(sent, first, args.topology, slow)
    slow_serial = step_of(prefill({**ALL_TO_ALL, "dbo": NEVER}, str(slow)))
    slow_split = step_of(prefill(ALL_TO_ALL, str(slow)))
    decode = dry_run(
        args.chip, args.topology, "--requests=24", "--prompt-tokens=1024", "--output-tokens=8",
        "--max-num-batched-tokens=8192", config={"torchair_graph_config": {"enabled": True}},
    )  # fmt: skip
    decodes = [each for each in decode["steps"] if each["tokens"] == DECODE_STEP]
    interval_ms = decodes[-1]["modelled"]["host_ps"] / 10**9
    share = first["modelled"]["communication_ps"] / first["modelled"]["host_ps"]
    ratio, slow_ratio = rate(second) / rate(first), rate(slow_split) / rate(slow_serial)
    # All-to-alls and all-reduces are of two groups and run beside each other in a split step: the
    # sum of their times is no bound there.
    rows = [
        modelled(
            "prefill, published order, serial", "requests/s", rate(first),
            note=beside(rate(first), SERIAL),
        ),
        modelled(
            "prefill, published order, dual-batch overlap", "requests/s", rate(second),
            baseline=rate(first), bound=bound(second), at_least=GOAL_OVERLAP,
            note=beside(rate(second), OVERLAPPED)
            + f"; ratio {ratio:.3f}, published {OVERLAPPED / SERIAL:.3f}",
        ),
        modelled(
            "of the bound of overlap", "share", rate(second) / bound(second),
            at_least=GOAL_OF_BOUND,
        ),
        modelled(
            "prefill, lean order with overlap", "requests/s", rate(best), baseline=rate(first),
            bound=bound(best), at_least=GOAL_BEST,
            note="one reduction of experts, reduce-scatter and all-gather, shards",
        ),
        modelled(
            "communication in serial prefill", "share", share,
            note=beside(share, SHARE) + ", published as the most that was seen",
        ),
        modelled(
            "prefill, all-to-all, serial, unfitted", "requests/s", rate(sent),
            note=beside(rate(sent), SERIAL_ALL_TO_ALL),
        ),
        modelled(
            "prefill, all-to-all, dual-batch overlap", "requests/s", rate(slow_split),
            baseline=rate(slow_serial), at_least=GOAL_ALL_TO_ALL,
            note=f"all-to-alls {fitted:.2f} times as long, fitted on the published serial rate of "
            f"{SERIAL_ALL_TO_ALL} ({rate(slow_serial):.3f} here); "
            + beside(rate(slow_split), OVERLAPPED_ALL_TO_ALL)
            + f"; ratio {slow_ratio:.3f}, published "
            f"{OVERLAPPED_ALL_TO_ALL / SERIAL_ALL_TO_ALL:.3f}",
        ),
        modelled(
            "decode of 24 requests", "ms", interval_ms, note=beside(interval_ms, INTERVAL_MS)
        ),
    ]  # fmt: skip
    return Result(
        benchmark="published/deepseek_r1_w8a8",
        ours="dual-batch overlap, on the modelled clock with contention",
        baseline="the published order of work in one piece, on the same machine",
        rows=rows,
        settings={
            "chip": args.chip,
            "topology": args.topology,
            "routing": args.routing,
            "figures": serial["machine"]["hash"],
            "assumed figures": len(serial["machine"]["assumptions"]),
            "fitted": f"all_to_all_share / {fitted:.2f}, in the rows of all-to-all with overlap",
        },
        seed=0,
        device=f"modelled, no NPU: {serial['machine']['title']}",
        bounded_by="the longer of computing and communicating, each undisturbed",
    )


def modelled(name: str, unit: str, ours: float, **fields: Any) -> Row:
    return Row(name, unit, ours, Kind.MODELLED, **fields)


def step_of(report: dict[str, Any]) -> dict[str, Any]:
    """The one step of a prefill."""
    step: dict[str, Any] = report["steps"][0]
    return step


def rate(step: dict[str, Any]) -> float:
    return REQUESTS * PS_PER_SECOND / float(step["modelled"]["host_ps"])


def bound(step: dict[str, Any]) -> float:
    return REQUESTS * PS_PER_SECOND / float(step["overlap_bound_ps"])


def slower_all_to_all(
    step: dict[str, Any], without: dict[str, Any], topology: str, destination: Path
) -> float:
    """Writes a topology on which the serial step has the published rate; returns by what factor
    all-to-alls take longer on it.

    without: the same step without all-to-alls
    """
    all_to_all_ps = step["modelled"]["communication_ps"] - without["modelled"]["communication_ps"]
    missing_ps = REQUESTS * PS_PER_SECOND / SERIAL_ALL_TO_ALL - step["modelled"]["host_ps"]
    factor = 1 + missing_ps / all_to_all_ps

    def slower(match: re.Match[str]) -> str:
        return f"{match[1]}{float(match[2]) / factor:.6f}"

    file = Path(timing.__file__).parent / "topologies" / f"{topology}.toml"
    text = file.read_text(encoding="utf-8")
    destination.write_text(
        re.sub(r"(all_to_all_share = \{ value = )([\d.]+)", slower, text), encoding="utf-8"
    )
    return factor


def beside(ours: float, published: float) -> str:
    return f"published {published:g}, error {ours / published - 1:+.0%}"
