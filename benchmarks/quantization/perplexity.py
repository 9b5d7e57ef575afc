"""Perplexity of int8 checkpoints on held-out text, compared with their bf16 source.

`vllm-davinci quantize` makes all int8 checkpoints. `vllm-davinci perplexity` scores each with the
same windows of text, so that only the arithmetic differs. Shipped checkpoints were trained on the
standard library's source: training files calibrate, held-out files are scored. For a model in
another directory, three quarters of Python's help texts (`pydoc_data.topics`) calibrate, and one
quarter is scored.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console

from child import run_child
from result import Kind, Result, Row

PROCESS_LIMIT_S = 3600
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
BARE = ("--no-smoothing", "--budget", "none")
# Name -> type, True if calibrated with text, further options, and maximum perplexity relative to
# bf16. Rounding alone has no limit, because its loss depends on the model.
CASES: dict[str, tuple[str, bool, tuple[str, ...], float | None]] = {
    "W8A16": ("W8A16", False, (), 1.01),
    "W8A8_DYNAMIC": ("W8A8_DYNAMIC", False, (), None),
    "W8A8_DYNAMIC, calibrated": ("W8A8_DYNAMIC", True, (), 1.015),
    "W8A8, rounding alone": ("W8A8", True, BARE, None),
    "W8A8, all layers": ("W8A8", True, ("--budget", "none"), None),
    "W8A8": ("W8A8", True, (), 1.03),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="tiny_deepseek",
        help="a name under checkpoints/, or a directory (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument(
        "--tokens",
        type=int,
        default=16_384,
        help="predicted tokens, spread over all held-out files",
    )
    parser.add_argument("--window", type=int, default=512, help="tokens per scored window")
    parser.add_argument("--calibration-tokens", type=int, default=12_288)


def run(args: argparse.Namespace) -> Result:
    source = CHECKPOINTS / args.model  # an absolute path replaces CHECKPOINTS
    seen, unseen = _texts_of_others() if Path(args.model).is_dir() else _texts_of_ours()
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        held_out = []
        for number, content in enumerate(unseen):
            held_out.append(scratch / f"held_out_{number}.txt")
            held_out[-1].write_text(content, encoding="utf-8")
        text = scratch / "calibration.txt"
        # Use a part of every file, so that ranges cover all kinds of text.
        share = max(1, 8 * args.calibration_tokens // len(seen))
        text.write_text("\n".join(content[:share] for content in seen), encoding="utf-8")
        console.print(f"scoring {args.model} in bf16")
        baseline, count = _score(source, held_out, args)
        console.print(f"bf16: {baseline:.3f}")
        rows = []
        for number, name in enumerate(args.only):
            kind, is_calibrated, options, at_most = CASES[name]
            console.print(f"quantizing to {name} and scoring")
            made, report = scratch / f"made_{number}", scratch / f"report_{number}.json"
            if is_calibrated:
                options += ("--calibrate", str(text), "--report", str(report))
                options += ("--calibration-tokens", str(args.calibration_tokens))
            command = ["-m", "vllm_davinci.meta", "quantize", str(source), str(made)]
            run_child([*command, "--type", kind, *options], PROCESS_LIMIT_S)
            value, _ = _score(made, held_out, args)
            note = f"{100 * (value / baseline - 1):+.2f} % over bf16"
            if is_calibrated:
                note += f"; {_calibration(json.loads(report.read_text(encoding='utf-8')))}"
            console.print(f"{name}: {value:.3f}, {note}")
            rows.append(
                Row(
                    name=f"perplexity, {name}",
                    unit="",
                    ours=value,
                    baseline=baseline,
                    kind=Kind.MEASURED,
                    at_most=at_most,
                    note=note,
                )
            )
    return Result(
        ours="int8",
        baseline="bf16",
        rows=rows,
        settings={
            "held_out_texts": len(unseen),
            "predicted_tokens": count,
            "window_tokens": args.window,
        },
        bounded_by="weights rounded to 255 levels per channel, activations per token or once",
    )


def _calibration(report: dict[str, Any]) -> str:
    """Formats the calibration text's loss, the number of products per type, and the costliest
    layers.
    """
    kinds = Counter(layer["type"] for layer in report["layers"])
    worst = sorted(report["layers"], key=lambda layer: -max(layer["estimated_loss"].values()))
    said = (
        f"{layer['layers'][0]} {max(layer['estimated_loss'].values()):.2%} as {layer['type']}"
        for layer in worst[:5]
    )
    return (
        f"calibration text {report['loss']:+.2%}, standard error {report['standard_error']:.2%}; "
        f"products {dict(kinds)}; costs most: {', '.join(said)}"
    )


def _texts_of_ours() -> tuple[list[str], list[str]]:
    """Returns the shipped checkpoints' training files, and their held-out files."""
    sys.path.append(str(CHECKPOINTS))
    from corpus import held_out_files, training_files  # beside the checkpoints, not a package

    return [file.text for file in training_files()], [file.text for file in held_out_files()]


def _texts_of_others() -> tuple[list[str], list[str]]:
    """Returns Python's help in English: texts for calibration, and one in four texts for
    scoring.
    """
    named = sorted(topics.items())
    is_scored = [hashlib.sha256(name.encode()).digest()[0] % 4 == 0 for name, _ in named]
    return tuple(
        [content for (_, content), scored in zip(named, is_scored, strict=True) if scored == wanted]
        for wanted in (False, True)
    )


def _score(model: Path, texts: list[Path], args: argparse.Namespace) -> tuple[float, int]:
    options = ["--json", f"--window={args.window}", f"--tokens={args.tokens}"]
    command = ["-m", "vllm_davinci.meta", "perplexity", str(model), *map(str, texts), *options]
    done = run_child([*command, "--", "--dtype=bfloat16", "--enforce-eager"], PROCESS_LIMIT_S)
    found = json.loads(done.splitlines()[-1])
    return found["perplexity"], found["tokens"]
