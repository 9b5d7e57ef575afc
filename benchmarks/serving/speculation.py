"""Speculative decoding with trained drafters, compared with no drafts.

One process per engine continues the same prompts greedily. This machine's processor computes a
    step's rows one after another, but a chip that waits for weights verifies several rows in about
    the time of one: tokens per second differ there. Launches and tokens per step are counted. The
    engines run one after the other, so their rates are comparable only on an idle machine.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from child import measured
from result import Kind, Result, Row

PROCESS_LIMIT_S = 900
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
EAGLE3 = {"method": "eagle3", "model": str(CHECKPOINTS / "tiny_llama_eagle3")}
# Checkpoint -> cases: name -> --speculative-config.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny_deepseek": {
        "MTP, one draft": {"method": "mtp", "num_speculative_tokens": 1},
        "MTP, three drafts": {"method": "mtp", "num_speculative_tokens": 3},
    },
    "tiny_llama": {
        "EAGLE-3, three drafts": {**EAGLE3, "num_speculative_tokens": 3},
        "n-grams, three drafts": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
        },
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> Result:
    settings = {key: getattr(args, key) for key in ("requests", "tokens", "rounds")}
    rows: list[Row] = []
    for checkpoint, cases in CASES.items():
        shared = {**settings, "model": str(CHECKPOINTS / checkpoint)}
        plain = _found({**shared, "speculative": None})
        for name, speculative in cases.items():
            with_drafts = _found({**shared, "speculative": speculative})
            for count in args.requests:
                label = f"{checkpoint}, {name}, {count} at once"
                rows += _rows(label, with_drafts[str(count)], plain[str(count)])
    return Result(
        ours="an engine with --speculative-config",
        baseline="the same engine without",
        rows=rows,
        settings=settings,
        bounded_by="the drafter's passes; the rows of drafts that are not kept",
    )


def _found(options: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    found: dict[str, Any] = measured("serving.speculation_process", options, PROCESS_LIMIT_S)
    return found


def _rows(label: str, ours: list[dict[str, float]], plain: list[dict[str, float]]) -> list[Row]:
    def median(rounds: list[dict[str, float]], key: str) -> float:
        return statistics.median(each[key] for each in rounds)

    def row(what: str, unit: str, key: str, kind: Kind, **goal: float) -> Row:
        values = median(ours, key), median(plain, key)
        return Row(f"{label}: {what}", unit, values[0], kind, baseline=values[1], **goal)

    return [
        row("tokens per second", "tokens/s", "tokens_per_second", Kind.MEASURED),
        row("tokens of a request per step", "", "tokens_per_step", Kind.COUNTED, at_least=1.0),
        row("launches per step", "", "launches_per_step", Kind.COUNTED),
    ]
