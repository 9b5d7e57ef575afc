"""Published steps of DeepSeek-R1 W8A8 on 16 chips, beside the timing model of the same machine.

Prefill of 4 x 4096 tokens with and without dual-batch overlap, and decode of 24 requests. Nothing
is fitted. Ours is modelled; the published figures are measured, by others, on another release of
another plugin, and their exact machine is not known: notes have them beside ours, with the error.
"""

from __future__ import annotations

import argparse
from typing import Any

from published.deepseek_r1 import dry_run
from result import Kind, Result, Row

PS_PER_SECOND = 10**12
# Requests per second, without and with overlap (all-gather and all-reduce); ms between tokens;
# share of communication in prefill, at most. Single runs.
PUBLISHED_SERIAL = 2.17
PUBLISHED_OVERLAPPED = 2.60
PUBLISHED_INTERVAL_MS = 59.88
PUBLISHED_SHARE = 0.55
# Of the serial rate, what dual-batch overlap is to reach.
GOAL_OF_SERIAL = 1.45


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", default="ascend910b2", help="see `vnpu machines`")
    parser.add_argument("--topology", default="two-meshes-of-8")


def run(args: argparse.Namespace) -> Result:
    prompts = ("--requests=4", "--prompt-tokens=4096", "--output-tokens=1", "--enforce-eager")
    serial = dry_run(args.chip, args.topology, *prompts)
    overlapped = dry_run(args.chip, args.topology, *prompts, "--enable-dbo")
    decode = dry_run(
        args.chip, args.topology, "--requests=24", "--prompt-tokens=1024", "--output-tokens=3"
    )
    first, second, last = serial["steps"][0], overlapped["steps"][0], decode["steps"][-1]
    share = first["modelled"]["communication_ps"] / first["modelled"]["host_ps"]
    interval_ms = last["modelled"]["host_ps"] / 10**9
    rows = [
        Row(
            "prefill, serial", "requests/s", rate(first, 4), Kind.MODELLED,
            note=beside(rate(first, 4), PUBLISHED_SERIAL),
        ),
        Row(
            "prefill, dual-batch overlap", "requests/s", rate(second, 4), Kind.MODELLED,
            baseline=rate(first, 4),
            bound=4 * PS_PER_SECOND / first["overlap_bound_ps"],
            at_least=GOAL_OF_SERIAL,
            note=beside(rate(second, 4), PUBLISHED_OVERLAPPED)
            + f"; ratio {rate(second, 4) / rate(first, 4):.3f}, published "
            f"{PUBLISHED_OVERLAPPED / PUBLISHED_SERIAL:.3f}",
        ),
        Row(
            "communication in serial prefill", "share", share, Kind.MODELLED,
            note=beside(share, PUBLISHED_SHARE) + ", published as the most that was seen",
        ),
        Row(
            "decode of 24 requests", "ms", interval_ms, Kind.MODELLED,
            note=beside(interval_ms, PUBLISHED_INTERVAL_MS),
        ),
    ]  # fmt: skip
    return Result(
        benchmark="published/deepseek_r1_w8a8",
        ours="dual-batch overlap, on the modelled clock with contention",
        baseline="the same step in one piece, on the same machine",
        rows=rows,
        settings={
            "chip": args.chip,
            "topology": args.topology,
            "figures": serial["machine"]["hash"],
            "assumed figures": len(serial["machine"]["assumptions"]),
            "fitted": "nothing",
        },
        seed=0,
        device=f"modelled, no NPU: {serial['machine']['title']}",
        bounded_by="the longer of computing and communicating, each undisturbed",
    )


def rate(step: dict[str, Any], requests: int) -> float:
    return requests * PS_PER_SECOND / float(step["modelled"]["host_ps"])


def beside(ours: float, published: float) -> str:
    return f"published {published:g}, error {ours / published - 1:+.0%}"
