"""Dual-batch overlap on the clock: prefills of two ranks, whole and split, with their bound.

Operators and collectives take artificial times on the virtual NPU, in proportion to the bytes that
they write, so that half a step takes half as long. They sleep and do no arithmetic: two ranks, each
with streams for computation and communication, need no more than the host's cores. Traces of both
runs say how much of the communication was hidden; `--traces DIRECTORY` keeps them.

The artificial times of the dense model make its stretches between collectives equally long, as
equal times for every product do. Where they differ, each half's stretch still lies under one of the
other half's collectives, and of each such pair the longer one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from child import run_child
from multistream.intervals import length
from multistream.step_trace import StepTrace, steps_of
from result import Kind, Result, Row
from vllm_davinci.vnpu import timeline

CHILD = Path(__file__).with_name("overlap_process.py")
CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
LIMIT_S = 300
# The checkpoints that are shipped, with more layers; for latent attention with a hidden size larger
# than the latent one, as in models that are not tiny.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tiny_llama", {}),
    "deepseek": (
        "tiny_deepseek",
        {
            "hidden_size": 1536,
            "q_lora_rank": 384,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 192,
            "intermediate_size": 1024,
        },
    ),
}
# Microseconds per MiB written: computation and communication about as long as each other.
PACES = {
    "dense": "aclnnM=16000/MiB,aclnnFused=32000/MiB,all_reduce=48000/MiB",
    "deepseek": "aclnnM=2000/MiB,aclnnGrouped=2000/MiB,aclnnBatch=2000/MiB,aclnnFused=4000/MiB,"
    "aclnnMoe=100,all_=4000/MiB,reduce_scatter=8000/MiB",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each request")
    parser.add_argument("--repetitions", type=int, default=3, help="prefills that count")
    parser.add_argument("--pace", help="VNPU_PACE instead of the models' own")
    parser.add_argument("--traces", type=Path, help="keep the traces in this directory")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Result:
    rows: list[Row] = []
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        kept: Path = args.traces or Path(scratch)
        for name in args.models:
            model = Path(scratch) / name
            vocabulary = write_model(model, name, args.layers, args.tokens)
            sides = {}
            for side in ("whole", "split"):
                console.print(f"{name}: {side}")
                directory = kept / f"{name}_{side}"
                directory.mkdir(parents=True, exist_ok=True)
                for old in directory.iterdir():
                    old.unlink()
                sides[side] = _prefills(args, name, model, vocabulary, side == "split", directory)
            rows += _rows(name, sides["whole"], sides["split"])
    return Result(
        benchmark="multistream/overlap",
        ours="two micro-batches in turn (dbo.enabled)",
        baseline="whole steps",
        rows=rows,
        settings={
            **{key: getattr(args, key) for key in ("layers", "requests", "tokens", "repetitions")},
            "artificial_durations": {name: args.pace or PACES[name] for name in args.models},
            "ranks": 2,
        },
        seed=args.seed,
        device="vnpu, policy threads, artificial durations",
        bounded_by=(
            "the longer of computation and communication of the same run, and the part of the step "
            "that is not split; of the rest, the first half's first and the second half's last "
            "stretch have nothing to hide under"
        ),
    )


def write_model(directory: Path, name: str, num_layers: int, num_tokens: int) -> int:
    """Writes a configuration without weights. Returns the size of its vocabulary."""
    checkpoint, changes = MODELS[name]
    text = (CHECKPOINTS / checkpoint / "config.json").read_text(encoding="utf-8")
    configuration = {
        **json.loads(text),
        **changes,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 2 * num_tokens,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return int(configuration["vocab_size"])


def _prefills(
    args: argparse.Namespace,
    name: str,
    model: Path,
    vocabulary: int,
    is_split: bool,
    directory: Path,
) -> list[StepTrace]:
    """The steps of one run."""
    found = model / "found.json"
    options = {
        "model": str(model),
        "vocabulary": vocabulary,
        "tokens": args.tokens,
        "requests": args.requests,
        "repetitions": args.repetitions,
        "seed": args.seed,
        "additional_config": {"dbo": {"enabled": is_split}},
        "result": str(found),
    }
    run_child(
        [str(CHILD), json.dumps(options)],
        LIMIT_S,
        {
            **os.environ,
            "VNPU_SCHEDULE": "threads",
            "VNPU_COMPUTE": "0",
            "VNPU_PACE": args.pace or PACES[name],
            "VNPU_TRACE": str(directory),
            # The engine in the process that asks: it sees a batch's requests all at once.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
        },
    )
    windows = [tuple(batch) for batch in json.loads(found.read_text(encoding="utf-8"))]
    (directory / "prefills.json").write_text(json.dumps(windows), encoding="utf-8")
    return steps_of(timeline.read([directory]), windows)


def _rows(name: str, whole: list[StepTrace], split: list[StepTrace]) -> list[Row]:
    def milliseconds(steps: list[StepTrace]) -> list[float]:
        return [(step.end - step.begin) / 1000 for step in steps]

    measured = milliseconds(split)
    step = split[measured.index(min(measured))]
    bound = statistics.median(step.bound() / 1000 for step in split)
    return [
        Row(
            name=f"{name}: prefill, from request to answer",
            unit="ms",
            ours=statistics.median(measured),
            baseline=statistics.median(milliseconds(whole)),
            kind=Kind.MEASURED,
            bound=bound,
        ),
        Row(
            name=f"{name}: the same against its bound",
            unit="x",
            ours=statistics.median(
                (step.end - step.begin) / step.bound() for step in split
            ),
            kind=Kind.MEASURED,
            at_most=1.08,
            note="bound: max(computation, communication) + unsplit part",
        ),
        Row(
            name=f"{name}: first half's communication under second half's computation",
            unit="share of the smaller",
            ours=statistics.median(step.hidden_share() for step in split),
            kind=Kind.MEASURED,
            at_least=0.85,
        ),
        *(
            Row(name=f"{name}: {what} of a split prefill", unit="ms", ours=value / 1000,
                kind=Kind.MEASURED)
            for what, value in (
                ("computation", length(step.computing())),
                ("communication", length(step.communicating())),
                ("unsplit part", step.unsplit()),
            )
        ),
    ]  # fmt: skip
