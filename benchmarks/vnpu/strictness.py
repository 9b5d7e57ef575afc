"""Cost of holding every call against CANN's documents, and that none is refused.

`serving/offline_throughput`'s engine, over virtual NPUs that check calls and over such that do not
(VNPU_STRICT=0), in processes of their own, in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from result import Kind, Result, Row
from serving import offline_throughput, random_llama
from vllm_davinci.vnpu import refusals

LEAST_RATIO = 0.97


def add_arguments(parser: argparse.ArgumentParser) -> None:
    offline_throughput.add_arguments(parser)
    parser.set_defaults(rounds=3)


def run(args: argparse.Namespace) -> Result:
    sides: dict[str, list[dict[str, Any]]] = {"1": [], "0": []}
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        model: Path = args.model or Path(scratch) / "llama"
        if args.model is None:
            random_llama.write(model, args.seed)
        options = offline_throughput.process_options(args, model)
        counted = Path(scratch) / "refusals"
        counted.mkdir()
        for number in range(1, args.rounds + 1):
            # Whoever is first in a round is second in the next.
            for strict in sorted(sides, reverse=number % 2 == 0):
                console.print(f"round {number}/{args.rounds}: VNPU_STRICT={strict}")
                environment = {
                    **os.environ,
                    "VNPU_STRICT": strict,
                    "VNPU_REFUSALS": str(counted),
                }
                sides[strict].append(
                    offline_throughput.run_process(
                        sys.executable, options, environment, Path(scratch)
                    )
                )
        found = refusals.read(counted)
    return Result(
        benchmark="vnpu/strictness",
        ours="calls held against CANN's documents",
        baseline="the same without checks",
        rows=_rows(sides["1"], sides["0"], found),
        settings={
            "model": args.model.name if args.model else {"llama": random_llama.SHAPE},
            **{key: options[key] for key in ("requests", "prompt_tokens", "output_tokens",
                                             "kv_cache_bytes", "repetitions")},
            "rounds": args.rounds,
        },
        seed=args.seed,
        device="vnpu, policy " + os.environ.get("VNPU_SCHEDULE", "eager"),
        bounded_by="the checks of a call's sizes, dtypes and numbers, before its launch",
    )  # fmt: skip


def _rows(
    strict: list[dict[str, Any]], lenient: list[dict[str, Any]], found: refusals.Refusals
) -> list[Row]:
    return [
        *offline_throughput.rate_rows(strict, lenient, LEAST_RATIO, LEAST_RATIO),
        offline_throughput.start_up_row(strict, lenient),
        Row(
            name="calls held against the documents, per process",
            unit="calls",
            ours=sum(found.calls.values()) / len(strict),
            kind=Kind.COUNTED,
        ),
        Row(
            name="calls refused",
            unit="calls",
            ours=float(len(found.refused)),
            kind=Kind.COUNTED,
            at_most=0.0,
            note="; ".join(sorted({refusal.message for refusal in found.refused}))[:200],
        ),
    ]
