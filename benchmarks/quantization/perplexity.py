"""Perplexity of int8 checkpoints on held-out text, beside the bf16 checkpoint they come from.

`vllm-davinci quantize` makes all int8 checkpoints; the static one's input ranges come from
training text. `vllm-davinci perplexity` scores the same windows of held-out files of the standard
library with each model, so that the figures differ by the arithmetic alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from child import run_child
from result import Kind, Result, Row

PROCESS_LIMIT_S = 1200
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
# Type -> the most its perplexity may be over that of bf16.
AT_MOST = {"W8A16": 1.01, "W8A8_DYNAMIC": 1.01, "W8A8": 1.02}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="tiny_deepseek", help="a name under checkpoints/ (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=16_384,
        help="predicted tokens, spread over all held-out files",
    )
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--calibration-tokens", type=int, default=8192)


def run(args: argparse.Namespace) -> Result:
    sys.path.append(str(CHECKPOINTS))
    from corpus import held_out_files, training_files  # beside the checkpoints, not a package

    source = CHECKPOINTS / args.model
    files = held_out_files()
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        held_out = []
        for number, file in enumerate(files):
            held_out.append(scratch / f"held_out_{number}.txt")
            held_out[-1].write_text(file.text, encoding="utf-8")
        text = scratch / "training.txt"
        # A part of every file: ranges should know all sorts of text.
        share = max(1, 8 * args.calibration_tokens // len(training_files()))
        text.write_text("\n".join(file.text[:share] for file in training_files()))
        console.print(f"scoring {args.model} in bf16")
        baseline, count = _score(source, held_out, args)
        rows = []
        for kind, at_most in AT_MOST.items():
            console.print(f"quantizing to {kind} and scoring")
            made = scratch / kind
            _quantize(source, made, kind, text, args.calibration_tokens)
            value, _ = _score(made, held_out, args)
            rows.append(
                Row(
                    name=f"perplexity, {kind}",
                    unit="",
                    ours=value,
                    baseline=baseline,
                    kind=Kind.MEASURED,
                    at_most=at_most,
                    note=f"{100 * (value / baseline - 1):+.2f} % over bf16",
                )
            )
    return Result(
        benchmark="quantization/perplexity",
        ours="int8",
        baseline="bf16",
        rows=rows,
        settings={
            "model": args.model,
            "held_out_files": len(files),
            "predicted_tokens": count,
            "window_tokens": args.window,
            "calibration_tokens": args.calibration_tokens,
        },
        seed=0,
        device="vnpu, policy " + os.environ.get("VNPU_SCHEDULE", "eager"),
        bounded_by="weights rounded to 255 levels per channel, activations per token or once",
    )


def _quantize(source: Path, made: Path, kind: str, text: Path, tokens: int) -> None:
    options = ["--type", kind]
    if kind == "W8A8":
        options += ["--calibrate", str(text), "--calibration-tokens", str(tokens)]
    command = ["-m", "vllm_davinci.meta", "quantize", str(source), str(made), *options]
    run_child(command, PROCESS_LIMIT_S)


def _score(model: Path, texts: list[Path], args: argparse.Namespace) -> tuple[float, int]:
    options = ["--json", f"--window={args.window}", f"--tokens={args.tokens}"]
    command = ["-m", "vllm_davinci.meta", "perplexity", str(model), *map(str, texts), *options]
    done = run_child([*command, "--", "--dtype=bfloat16", "--enforce-eager"], PROCESS_LIMIT_S)
    found = json.loads(done.splitlines()[-1])
    return found["perplexity"], found["tokens"]
